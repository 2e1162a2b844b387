"""Whether a checkpoint fits on the disk, looked at before a byte of it is written."""

import os
from pathlib import Path

from worker.training.failures import TrainingFailure

_MOST_IN_A_ROW = 3
_MORE_BYTES = 2**20
_MORE_PART = 50
"""For what stands around the tensors: headers, the optimizer's structure, the manifest."""


class Room:
    """The watch over the free bytes below one folder."""

    def __init__(self, folder: Path, reserve: int) -> None:
        """`reserve` bytes are to stay free for others."""
        self._folder = folder
        self._reserve = reserve
        self._put_off = 0

    def lacking(self, size: int) -> str | None:
        """Why a checkpoint whose tensors have `size` bytes does not fit, in sentences; None: it does."""
        disk = os.statvfs(self._folder)
        if not disk.f_blocks:
            return None  # some network file systems count no blocks
        needed, free = size + size // _MORE_PART + _MORE_BYTES, disk.f_bavail * disk.f_frsize
        if needed + self._reserve <= free:
            self._put_off = 0
            return None
        return (
            f"it needs {_mib(needed)}, and {self._folder} has {_mib(free)} free, of which {_mib(self._reserve)} are to "
            "stay free (ANNEAL_DISK_RESERVE_BYTES). Make room there, or lower `save_total_limit`"
        )

    def put_off(self, step: int, why: str, next_step: int, is_due: bool) -> str:
        """A checkpoint on the way does not fit; answers what to tell. Those that are due by `save_steps` are counted.

        `next_step` is where the next one is due.

        Raises:
            TrainingFailure: `disk_full`, where it is one too many in a row.
        """
        self._put_off += is_due
        if is_due and self._put_off >= _MOST_IN_A_ROW:
            raise TrainingFailure(
                "disk_full",
                f"The checkpoint of step {step} does not fit on the disk, nor did the {self._put_off - 1} that were "
                f"due before it: {why}, and resume the run.",
            )
        return (
            f"The checkpoint of step {step} does not fit on the disk: {why}. This one is left out; the next is due at "
            f"step {next_step}. When {_MOST_IN_A_ROW} that are due do not fit in a row, or the last of the run does "
            "not, it ends with disk_full."
        )


def ended_without(step: int, why: str, kept: int, goes_on: bool) -> str:
    """What to tell where a run ends early at `step`, and its checkpoint cannot be saved: `kept` is the last that was.

    `goes_on` says that it is handed back, and goes on without being asked.
    """
    place = f"the checkpoint of step {kept}" if kept else "the start"
    after = f"it goes on from {place}, and trains steps {kept + 1} to {step} again"
    then = f"The run is handed back without it: {after}" if goes_on else f"The run ends without it: if resumed, {after}"
    return f"The checkpoint of step {step} is not saved: {why.rstrip('.')}. {then}."


def refused(step: int, why: str) -> TrainingFailure:
    """How a run ends whose last checkpoint does not fit."""
    return TrainingFailure(
        "disk_full", f"The checkpoint of step {step} does not fit on the disk: {why}, and resume the run."
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
