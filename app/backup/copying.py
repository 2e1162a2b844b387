"""Copies files with their SHA-256, and takes over those that an earlier backup already has."""

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from app.backup.contents import Contents
from app.backup.layout import FileEntry
from app.infra.errors import SetupError
from app.infra.files.untrusted_folder import OutsideStorage, entries_below, open_below

_PIECE_BYTES = 1 << 20
_WALKS = 10
"""Walks through a folder in which another process removes folders at the same time."""
_LEFTOVERS = re.compile(r"\..*|base_model|base_model\..*", re.DOTALL)
"""Names of what a trainer leaves in the folder of its attempt if it is killed."""

Advance = Callable[[int], None]
"""Takes the number of bytes that were just copied."""


@dataclass(frozen=True)
class SourceFile:
    """Regular file of the storage."""

    path: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class EarlierFile:
    """File that an earlier backup has."""

    entry: FileEntry
    location: Path


@dataclass
class CopyCounts:
    """Result of copying."""

    copied: int = 0
    copied_bytes: int = 0
    reused: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reason by path."""


class UnreadableFile(Exception):
    """The file itself cannot be read, which says nothing about the others; the text is the reason."""


def stored_files(root: Path, contents: Contents, unreadable: dict[str, str]) -> Iterator[SourceFile]:
    """Yield the files of all datasets and runs that the database knows.

    Later attempts and checkpoints than those in the snapshot are left out: a restored service numbers its next attempt
    the same, and must find no files there. So are hidden folders, which are half written. Folders that cannot be read,
    for which a trainer suffices, are added to `unreadable`.
    """
    for dataset_id in dict.fromkeys(dataset.id for dataset in contents.datasets):
        yield from _list_files(root, f"datasets/{dataset_id}", lambda _: True, unreadable)
    checkpoints = {(stored.run_id, stored.attempt, stored.name) for stored in contents.checkpoints}
    for run_id, newest in contents.attempts.items():

        def is_wanted(path: str, run_id: str = run_id, newest: int = newest) -> bool:
            return _is_of_run(path.split("/"), run_id, newest, checkpoints)

        yield from _list_files(root, f"runs/{run_id}", is_wanted, unreadable)


def _is_of_run(parts: list[str], run_id: str, newest: int, checkpoints: set[tuple[str, int, str]]) -> bool:
    top = parts[0]
    if top.startswith("."):
        return False
    attempt = int(top[1:]) if top[:1] == "a" and top[1:].isdecimal() else None
    if attempt is None or len(parts) == 1:
        return True
    name = parts[1]
    if attempt > newest or _LEFTOVERS.fullmatch(name):
        return False
    return not name.startswith("checkpoint-") or (run_id, attempt, name) in checkpoints


def _list_files(
    root: Path, folder: str, is_wanted: Callable[[str], bool], unreadable: dict[str, str]
) -> Iterator[SourceFile]:
    def on_unreadable(path: str, error: PermissionError) -> None:
        if is_wanted(path):
            unreadable[f"{folder}/{path}"] = _error_reason(error)

    for path, status in _walk_entries(root / folder, on_unreadable):
        if status is not None and is_wanted(path):
            yield SourceFile(f"{folder}/{path}", status.st_size, status.st_mtime_ns)


def _walk_entries(
    folder: Path, on_unreadable: Callable[[str, PermissionError], None]
) -> list[tuple[str, os.stat_result | None]]:
    for _ in range(_WALKS):
        try:
            return list(entries_below(folder, on_unreadable))
        except FileNotFoundError:  # something in it was removed meanwhile
            if not folder.exists():
                return []
        except OSError as error:
            raise SetupError(
                f"{folder} cannot be read ({error.strerror}): run this as the user of the service."
            ) from None
    raise SetupError(f"Folders in {folder} are removed all the time: stop what removes them, and try again.")


class Copier:
    """Copies files below `source` to the same paths below `target`."""

    def __init__(self, source: Path, target: Path, earlier: Mapping[str, EarlierFile], advance: Advance) -> None:
        """Initialize; `earlier` are files that need not be read if they are unchanged."""
        self.counts = CopyCounts()
        self._source = source
        self._target = target
        self._earlier = earlier
        self._advance = advance

    def copy_file(self, file: SourceFile) -> FileEntry | None:
        """Copy a file, or link to the same file of an earlier backup; None if it does not exist or cannot be read."""
        target = self._target / file.path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if (entry := self._link_earlier(file, target)) is not None:
                self.counts.reused += 1
                self._advance(file.bytes)
                return entry
            entry = self._copy_content(file.path, target)
        except (FileNotFoundError, NotADirectoryError, OutsideStorage):
            return None
        except UnreadableFile as error:
            self.counts.unreadable[file.path] = str(error)
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                self.counts.unreadable[file.path] = "has a path that is too long"
                return None
            raise copy_error(file.path, target, error) from None
        self.counts.copied += 1
        self.counts.copied_bytes += entry.bytes
        return entry

    def is_reusable(self, file: SourceFile) -> bool:
        """Return True if an earlier backup has the file, unchanged in size and time of modification."""
        earlier = self._earlier.get(file.path)
        return earlier is not None and (earlier.entry.bytes, earlier.entry.mtime_ns) == (file.bytes, file.mtime_ns)

    def _link_earlier(self, file: SourceFile, target: Path) -> FileEntry | None:
        if not self.is_reusable(file):
            return None
        earlier = self._earlier[file.path]
        try:
            if earlier.location.stat().st_size != file.bytes:
                return None
            if earlier.location != target:
                target.unlink(missing_ok=True)
                target.hardlink_to(earlier.location)
        except OSError:  # it was deleted, or the file system has no links
            return None
        return earlier.entry

    def _copy_content(self, path: str, target: Path) -> FileEntry:
        target.unlink(missing_ok=True)  # it may be linked to a file of another backup
        digest, size = hashlib.sha256(), 0
        with os.fdopen(open_source(self._source, path), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
                for piece in pieces_of(file):
                    copy.write(piece)
                    digest.update(piece)
                    size += len(piece)
                    self._advance(len(piece))
            after = os.fstat(file.fileno())
        is_unchanged = (before.st_size, before.st_mtime_ns) == (
            after.st_size,
            after.st_mtime_ns,
        ) and size == after.st_size
        mtime_ns = after.st_mtime_ns if is_unchanged else 0
        os.utime(target, ns=(mtime_ns, mtime_ns))
        return FileEntry(path, size, digest.hexdigest(), mtime_ns, after.st_mode & 0o777)


def open_source(root: Path, path: str) -> int:
    """Open a file of the storage for reading and return its descriptor; raises `UnreadableFile`."""
    # Below the folder of a dataset or run no link is followed. Above it, the operator may have placed some.
    kind, name, below = path.split("/", 2)
    with _reading_source():
        return open_below(root / kind / name, below)


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file of the storage; raises `UnreadableFile`."""
    while True:
        with _reading_source():
            piece = file.read(_PIECE_BYTES)
        if not piece:
            return
        yield piece


@contextmanager
def _reading_source() -> Iterator[None]:
    """Raise `UnreadableFile` for errors of the file that is read, which are not those of its copy."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UnreadableFile(_error_reason(error)) from None


def _error_reason(error: OSError) -> str:
    return f"cannot be read ({error.strerror})"


def copy_error(path: str, target: Path, error: OSError) -> SetupError:
    """Return the error for a file that cannot be copied."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SetupError(f"The disk of {target.parent} is full: make room, and run the command again to continue.")
    return SetupError(f"{path} cannot be copied to {target} ({error.strerror}); run the command again to continue.")


def remove_others(root: Path, paths: set[str]) -> None:
    """Remove the files below `root` that are not in `paths`, and folders that become empty."""
    if not root.is_dir():
        return
    folders = []
    for path, status in entries_below(root):
        if status is None:
            folders.append(path)
        elif path not in paths:
            (root / path).unlink(missing_ok=True)
    for folder in sorted(folders, key=len, reverse=True):
        with suppress(OSError):  # it is not empty
            (root / folder).rmdir()
