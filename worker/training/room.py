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

    def put_off(self, step: int, why: str) -> str:
        """Count a periodic checkpoint that does not fit; answers what to tell.

        Raises:
            TrainingFailure: `disk_full`, where it is one too many in a row.
        """
        self._put_off += 1
        if self._put_off >= _MOST_IN_A_ROW:
            raise TrainingFailure(
                "disk_full",
                f"The checkpoint of step {step} does not fit on the disk, nor did the {self._put_off - 1} before it: "
                f"{why}, and resume the run.",
            )
        return (
            f"The checkpoint of step {step} is put off, it does not fit on the disk: {why}. It is tried again at the "
            f"next one that is due; when {_MOST_IN_A_ROW} in a row do not fit, the run ends with disk_full."
        )


def refused(step: int, why: str) -> TrainingFailure:
    """How a run ends whose last checkpoint does not fit."""
    return TrainingFailure(
        "disk_full", f"The checkpoint of step {step} does not fit on the disk: {why}, and resume the run."
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
