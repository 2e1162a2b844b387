"""Access to files in a folder that another Unix user, such as that of the training processes, may change at any moment.

Each folder on the way is opened relative to its parent and no link is followed, so nothing that is put in the place of
a file leads elsewhere or keeps the reader waiting.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_WAY = os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 32
_NOT_A_FILE = {errno.ELOOP, errno.ENXIO}
"""Errors from opening a symbolic link and a socket."""


class OutsideStorage(ValueError):
    """Path that leaves its root folder, contains a symbolic link or is no regular file."""


def open_below(root: Path, relative: str) -> int:
    """Open the regular file at `relative` below `root` for reading and return its descriptor; never blocks.

    Raises:
        OutsideStorage: See there; `root` must not be a link either.
        OSError: The file does not exist or cannot be opened.
    """
    *folders, name = _split_path(relative)
    folder = _open_folder(root, folders)
    try:
        file = os.open(name, _WAY | os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)  # opening a pipe would block
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
        raise OutsideStorage(f"not a regular file: {relative!r}") from error
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OutsideStorage(f"not a regular file: {relative!r}")
    return file


def read_below(root: Path, relative: str, most_bytes: int) -> bytes:
    """Return the content of a regular file below `root`; raises as `open_below` does, also if it is larger."""
    with os.fdopen(open_below(root, relative), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OutsideStorage(f"larger than {most_bytes:,} bytes: {relative!r}")
    return content


def create_below(root: Path, relative: str) -> int:
    """Create a file at `relative` below `root`, with the folders on the way; return a descriptor for writing.

    Raises:
        OutsideStorage: See there.
        OSError: Something with that name exists, or the file cannot be created.
    """
    *folders, name = _split_path(relative)
    folder = _open_folder(root, folders, create=True)
    try:
        return os.open(name, _WAY | os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)
    finally:
        os.close(folder)


def entries_below(
    root: Path, on_unreadable: Callable[[str, PermissionError], None] | None = None
) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield every path below `root` in no order: a regular file with its status, a folder with None.

    Links and other special files are left out, and so is what is nested more than 32 folders deep. Folders below `root`
    that this process may not read are given to `on_unreadable` and left out too; without it, they are an error.

    Raises:
        OSError: A folder cannot be read, or `root` is not a folder.
    """
    pending: list[list[str]] = [[]]
    while pending:
        above = pending.pop()
        try:
            folder = _open_folder(root, above)
        except PermissionError as error:
            if on_unreadable is None or not above:
                raise
            on_unreadable("/".join(above), error)
            continue
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    path = "/".join([*above, entry.name])
                    if entry.is_dir(follow_symlinks=False):
                        if len(above) < _MAX_DEPTH:
                            pending.append([*above, entry.name])
                        yield path, None
                    elif entry.is_file(follow_symlinks=False):
                        yield path, entry.stat(follow_symlinks=False)
        finally:
            os.close(folder)


def refuse_outside(relative: str) -> None:
    """Raise `OutsideStorage` for `..`, absolute paths, NUL, backslashes and empty parts."""
    _split_path(relative)


def _split_path(relative: str) -> list[str]:
    parts = relative.split("/")
    if "\0" in relative or "\\" in relative or any(part in ("", ".", "..") for part in parts):
        raise OutsideStorage(f"not a path below the folder: {relative!r}")
    return parts


def _open_folder(root: Path, parts: list[str], *, create: bool = False) -> int:
    folder = os.open(root, _WAY | os.O_RDONLY | os.O_DIRECTORY)
    for part in parts:
        try:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            below = os.open(part, _WAY | os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder
