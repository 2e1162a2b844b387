"""Small file system, which a test can fill."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PAGE_BYTES = 4096


def can_mount() -> bool:
    """Return True if this user may mount a file system."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "probe", folder], capture_output=True)
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=True)
    return done.returncode == 0


@contextmanager
def small_disk(folder: Path, size: int, inodes: int = 0) -> Iterator[Path]:
    """Mount a file system of `size` bytes on a new folder until the end of the block; 0 inodes: no limit."""
    folder.mkdir()
    options = f"size={size},nr_inodes={inodes},mode=0755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, free: int = 0) -> Path:
    """Occupy a disk except for `free` bytes; return the file, whose removal makes room again."""
    filler, size = disk / "filler", 0
    with filler.open("wb") as file:
        while (left := _free_bytes(disk) - free) > 0:
            part = max(left // 2, min(left, _PAGE_BYTES))  # others write meanwhile
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), size, part)
                size += part
    return filler


def _free_bytes(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize
