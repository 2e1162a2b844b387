"""Free space of file systems: the reserve that every writer of data keeps, and that of the embedded database."""

import errno
import os
from pathlib import Path

from anneal.local_service import read_json

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a write that the disk has no room for: blocks, inodes or quota."""

_LEAST_INODES = 1000
"""Free inodes below which nothing more is stored: without one, no file can be created however many bytes are free."""

_RESERVE_BYTES = 64 * 2**20
"""Size of the database's reserve: four segments of its log, or days of leases and heartbeats."""
_LEAST_BYTES = 64 * 2**20
"""Free bytes beside the reserve below which nothing more is stored."""
_RELEASE_BYTES = 32 * 2**20
"""Free bytes below which the reserve is given back."""


class DiskReserveReached(OSError):
    """Refused write: it would use bytes that must stay free; its text is a sentence for the caller."""

    def __init__(self, sentence: str) -> None:
        super().__init__(errno.ENOSPC, sentence)

    def __str__(self) -> str:
        return str(self.strerror)


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the folder's file system; None if it counts no blocks, as some network ones do."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def few_inodes(folder: Path) -> str | None:
    """Return how many inodes the folder's file system has free, if they are few; None also if it counts none."""
    disk = os.statvfs(folder)
    return f"{disk.f_favail:,} inodes" if disk.f_files and disk.f_favail < _LEAST_INODES else None


class DiskReserve:
    """Bytes of a folder's file system that the writers of data there leave free for others."""

    def __init__(self, folder: Path, reserve_bytes: int) -> None:
        self._folder = folder
        self._reserve_bytes = reserve_bytes

    def ensure_room(self, size: int) -> None:
        """Check that `size` more bytes can be written.

        Raises:
            DiskReserveReached: They would use the reserve.
        """
        if inodes := few_inodes(self._folder):
            raise DiskReserveReached(
                f"The disk of the server has only {inodes} free, and nothing was stored: delete runs or datasets that "
                "are no longer needed, or other files there, and try again."
            )
        free = free_bytes(self._folder)
        if free is not None and free - size < self._reserve_bytes:
            raise DiskReserveReached(
                f"The disk of the server has {format_mib(free)} free, of which {format_mib(self._reserve_bytes)} must "
                "stay free (ANNEAL_DISK_RESERVE_BYTES), and nothing was stored: delete runs or datasets that are "
                "no longer needed, or free some space there, and try again."
            )


class DatabaseReserve:
    """Room of the embedded database: a file that occupies some of its disk, and is given back when space runs out.

    PostgreSQL stops if it cannot write its log. Before that, everything that would grow it is refused; what it then
    still writes (leases, heartbeats, the end of runs) takes the room of the file.
    """

    def __init__(self, home: Path) -> None:
        self._folder = home / "postgres"
        self._file = self._folder / "reserve"
        self._is_released = False

    @classmethod
    def for_home(cls, home: Path, database_url: str | None) -> "DatabaseReserve | None":
        """Return that of the database at a URL; None if it is not the embedded one of this home."""
        embedded = (read_json(home / "embedded.json") or {}).get("database_url")
        return cls(home) if embedded is not None and embedded == database_url else None

    def describe_shortage(self, least_bytes: int = _LEAST_BYTES) -> str | None:
        """Return a clause that says how little room is left, if it is less than `least_bytes` beside the reserve."""
        try:
            free, inodes = free_bytes(self._folder), few_inodes(self._folder)
        except OSError as error:
            return f"the disk of the database is not available: {error.strerror}"
        if inodes is not None:
            return f"the disk of the database has only {inodes} free"
        if free is None or free - (_RESERVE_BYTES - self._held_bytes()) >= least_bytes:
            return None
        return f"the disk of the database has only {format_mib(free)} free"

    def adjust_reserve(self) -> str | None:
        """Give the reserve back when space runs out, and take it again later; return a sentence if it was changed."""
        try:
            free, held = free_bytes(self._folder), self._held_bytes()
            if free is not None and free < _RELEASE_BYTES and held:
                self._file.unlink(missing_ok=True)
                self._is_released = True
                return (
                    f"The disk of {self._folder} is almost full ({format_mib(free)} free): {format_mib(held)} that "
                    "were reserved for the database are given back to it. Nothing more is stored until there is room: "
                    "delete runs or datasets that are no longer needed, or free some space."
                )
            if free is not None and free >= _RESERVE_BYTES + 2 * _LEAST_BYTES and not self._file.exists():
                self._occupy_bytes()
                was_released, self._is_released = self._is_released, False
                return f"The disk of {self._folder} has room again: data is stored." if was_released else None
        except OSError:
            pass  # there is no such folder yet, or it cannot be used now
        return None

    def _occupy_bytes(self) -> None:
        """Occupy the bytes, or none of them."""
        with self._file.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
            except OSError:
                self._file.unlink()
                raise

    def _held_bytes(self) -> int:
        try:
            return min(self._file.stat().st_blocks * 512, _RESERVE_BYTES)
        except OSError:
            return 0


def format_mib(size: int) -> str:
    """Return a size for messages."""
    return f"{size / 2**20:,.0f} MiB"
