"""Checkpoints that do not fit on the disk: which are skipped, the warnings, and the failure of the run."""

from pathlib import Path

from worker.checkpoint_files.disk_space import DiskSpace
from worker.training.failures import TrainingFailure

_MAX_SKIPPED = 3


class CheckpointDiskSpace(DiskSpace):
    """Disk space for the checkpoints of a run; counts those that were skipped in a row."""

    def __init__(self, folder: Path, reserve: int) -> None:
        super().__init__(folder, reserve)
        self._skipped = 0

    def shortage_reason(self, size: int) -> str | None:
        """Return why a checkpoint of `size` bytes does not fit, or None. One that fits resets the count."""
        short = super().shortage_reason(size)
        if short is None:
            self._skipped = 0
        return short

    def skip_checkpoint(self, step: int, why: str, next_step: int, is_due: bool) -> str:
        """Skip a checkpoint during training that does not fit, and return the warning.

        Those that are due by `save_steps` (`is_due`) are counted. `next_step` is the step where the next one is due.

        Raises:
            TrainingFailure: `disk_full`, if too many in a row did not fit.
        """
        self._skipped += is_due
        if is_due and self._skipped >= _MAX_SKIPPED:
            raise TrainingFailure(
                "disk_full",
                f"The checkpoint of step {step} does not fit on the disk, nor did the {self._skipped - 1} that were "
                f"due before it: {why}, and resume the run.",
            )
        return (
            f"The checkpoint of step {step} does not fit on the disk: {why}. It is skipped; the next is due at step "
            f"{next_step}. If {_MAX_SKIPPED} due checkpoints in a row do not fit, or the last one of the run does "
            "not, the run ends with disk_full."
        )


def missing_checkpoint_warning(step: int, why: str, kept_step: int, goes_on: bool) -> str:
    """Return the warning for a run that ends early at `step` and whose checkpoint cannot be saved.

    `kept` is the step of the last one that was saved. `goes_on` is True if the run is released, and continues without
    a request.
    """
    place = f"the checkpoint of step {kept_step}" if kept_step else "the start"
    after = f"it goes on from {place}, and trains steps {kept_step + 1} to {step} again"
    then = f"The run is released without it: {after}" if goes_on else f"The run ends without it: if resumed, {after}"
    return f"The checkpoint of step {step} is not saved: {why.rstrip('.')}. {then}."


def disk_full_failure(step: int, why: str) -> TrainingFailure:
    """Build the failure of a run whose last checkpoint does not fit."""
    return TrainingFailure(
        "disk_full", f"The checkpoint of step {step} does not fit on the disk: {why}, and resume the run."
    )
