"""Check of the free disk space for a checkpoint, before a byte of it is written."""

import os
from pathlib import Path

from worker.training.failures import TrainingFailure

_MAX_SKIPPED = 3
_OVERHEAD_BYTES = 2**20
_OVERHEAD_DIVISOR = 50
"""Allowance for data around the tensors: headers, the optimizer's structure, the manifest."""


class Room:
    """Free disk space of one folder."""

    def __init__(self, folder: Path, reserve: int) -> None:
        """Keep `reserve` bytes free for others."""
        self._folder = folder
        self._reserve = reserve
        self._skipped = 0

    def lacking(self, size: int) -> str | None:
        """Return why a checkpoint with tensors of `size` bytes does not fit, in sentences; None if it fits."""
        disk = os.statvfs(self._folder)
        if not disk.f_blocks:
            return None  # some network file systems count no blocks
        needed, free = size + size // _OVERHEAD_DIVISOR + _OVERHEAD_BYTES, disk.f_bavail * disk.f_frsize
        if needed + self._reserve <= free:
            self._skipped = 0
            return None
        return (
            f"it needs {_mib(needed)}, and {self._folder} has {_mib(free)} free, of which {_mib(self._reserve)} must "
            "stay free (ANNEAL_DISK_RESERVE_BYTES). Free some space there, or lower `save_total_limit`"
        )

    def put_off(self, step: int, why: str, next_step: int, is_due: bool) -> str:
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


def ended_without(step: int, why: str, kept: int, goes_on: bool) -> str:
    """Return the warning for a run that ends early at `step` and whose checkpoint cannot be saved.

    `kept` is the step of the last one that was saved. `goes_on` is True if the run is released, and continues without
    a request.
    """
    place = f"the checkpoint of step {kept}" if kept else "the start"
    after = f"it goes on from {place}, and trains steps {kept + 1} to {step} again"
    then = f"The run is released without it: {after}" if goes_on else f"The run ends without it: if resumed, {after}"
    return f"The checkpoint of step {step} is not saved: {why.rstrip('.')}. {then}."


def refused(step: int, why: str) -> TrainingFailure:
    """Build the failure of a run whose last checkpoint does not fit."""
    return TrainingFailure(
        "disk_full", f"The checkpoint of step {step} does not fit on the disk: {why}, and resume the run."
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
