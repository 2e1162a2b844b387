"""Folders that may be nested more deeply than Python recurses, paths may be long, or descriptors there are."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from uuid import uuid4

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(folder: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder with all that it has.

    Each folder below is moved to the top before it is emptied, so that no depth matters. No link is followed.

    Raises:
        OSError: Something could not be removed, the first of such errors; not with `ignore_errors`.
    """
    errors: list[OSError] = []
    try:
        top = os.open(folder, _FOLDER)
        try:
            _empty_folder(top, errors)
        finally:
            os.close(top)
        if not errors:
            folder.rmdir()
    except OSError as error:
        errors.append(error)
    if errors and not ignore_errors:
        raise errors[0]


def _empty_folder(top: int, errors: list[OSError]) -> None:
    """Remove what is in the open folder `top`; errors are added to the list, and their entries stay."""
    moved_names = (f".removing-{uuid4().hex}-{number}" for number in count())
    failed: set[str] = set()
    while names := [name for name in os.listdir(top) if name not in failed]:
        for name in names:
            try:
                if not _is_folder(name, top):
                    os.unlink(name, dir_fd=top)
                    continue
                below = os.open(name, _FOLDER, dir_fd=top)
                try:
                    for inner in os.listdir(below):  # noqa: PTH208
                        if not _is_folder(inner, below):
                            os.unlink(inner, dir_fd=below)
                            continue
                        try:
                            os.rmdir(inner, dir_fd=below)  # an empty folder that is read-only cannot be moved
                        except OSError:
                            os.rename(inner, next(moved_names), src_dir_fd=below, dst_dir_fd=top)
                finally:
                    os.close(below)
                os.rmdir(name, dir_fd=top)
            except FileNotFoundError:
                continue  # another process removes it too
            except OSError as error:
                failed.add(name)
                errors.append(error)


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def bytes_below(folder: Path) -> int:
    """Return the total size of the files below a folder, without those that are removed or renamed meanwhile."""
    size = 0
    for entry in files_below(folder):
        with suppress(FileNotFoundError):
            size += entry.stat(follow_symlinks=False).st_size
    return size


def files_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries below a folder that are neither folders nor links, in no order, without recursion.

    What is removed meanwhile, cannot be read, or has a longer path than the system takes is left out.
    """
    pending = [str(folder)]
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif not entry.is_symlink():
                    yield entry
