"""Check of the free disk space for a checkpoint, before a byte of it is written."""

from pathlib import Path

from app.infra.files.disk_space import format_mib, free_bytes

_OVERHEAD_BYTES = 2**20

_OVERHEAD_DIVISOR = 50
"""Allowance for data around the tensors: headers, the optimizer's structure, the manifest."""


class DiskSpace:
    """Free disk space of one folder."""

    def __init__(self, folder: Path, reserve: int) -> None:
        """Keep `reserve` bytes free for others."""
        self._folder = folder
        self._reserve = reserve

    def shortage_reason(self, size: int) -> str | None:
        """Return why a checkpoint with tensors of `size` bytes does not fit, in sentences; None if it fits."""
        needed, free = size + size // _OVERHEAD_DIVISOR + _OVERHEAD_BYTES, free_bytes(self._folder)
        if free is None or needed + self._reserve <= free:
            return None
        return (
            f"it needs {format_mib(needed)}, and {self._folder} has {format_mib(free)} free, of which "
            f"{format_mib(self._reserve)} must stay free (ANNEAL_DISK_RESERVE_BYTES). Free some space "
            "there, or lower `save_total_limit`"
        )
