"""Check of the free disk space for a checkpoint, before a byte of it is written."""

import os
from pathlib import Path

_OVERHEAD_BYTES = 2**20

_OVERHEAD_DIVISOR = 50
"""Allowance for data around the tensors: headers, the optimizer's structure, the manifest."""


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the folder's file system; None if it counts no blocks, as some network ones do."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


class DiskSpace:
    """Free disk space of one folder."""

    def __init__(self, folder: Path, reserve: int) -> None:
        """Keep `reserve` bytes free for others."""
        self._folder = folder
        self._reserve = reserve

    def lacking(self, size: int) -> str | None:
        """Return why a checkpoint with tensors of `size` bytes does not fit, in sentences; None if it fits."""
        needed, free = size + size // _OVERHEAD_DIVISOR + _OVERHEAD_BYTES, free_bytes(self._folder)
        if free is None or needed + self._reserve <= free:
            return None
        return (
            f"it needs {_mib(needed)}, and {self._folder} has {_mib(free)} free, of which {_mib(self._reserve)} must "
            "stay free (ANNEAL_DISK_RESERVE_BYTES). Free some space there, or lower `save_total_limit`"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
