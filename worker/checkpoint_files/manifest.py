"""Atomic folders: a checkpoint or an output is written completely or not at all, and verified by its manifest.

Order: files → fsync each → `manifest.json` (size and SHA-256 of each file) → fsync → rename → fsync the parent.
Imports nothing heavy: the supervisor verifies checkpoints with it before it offers one for a resume.
"""

import hashlib
import json
import os
from collections.abc import Container, Iterator, Mapping
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

from app.infra.files.file_manifest import MANIFEST, MAX_BYTES, parse_manifest
from app.infra.files.tree import files_below, remove_tree
from app.infra.files.untrusted_folder import OutsideStorage, entries_below, open_below, read_below
from worker.wire.heartbeat import HeartbeatCallback, no_heartbeat

_FORMAT = 1
_PIECE = 1 << 20
_MAX_EXTRA = 10
_LONGEST_NAME = 200


def write_manifest(
    folder: Path,
    step: int,
    facts: Mapping[str, Any],
    alive: HeartbeatCallback = no_heartbeat,
    digests: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Sync every file of `folder` to the disk and describe it; return the SHA-256 of the manifest itself.

    `alive` is called after each file is on the disk, and for each piece of it that is read. Files whose SHA-256 is in
    `digests` are not read.

    Raises:
        OSError: the disk refused the write (full, read-only).
    """
    files = {}
    for path in _list_files(folder):
        _sync_to_disk(path)
        alive()
        name = path.relative_to(folder).as_posix()
        sha256 = digests.get(name) or _read_sha256(path, alive)
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256}
    text = json.dumps({"format": _FORMAT, "step": step, "files": files, **facts}, indent=1).encode()
    path = folder / MANIFEST
    path.write_bytes(text)
    _sync_to_disk(path)
    return hashlib.sha256(text).hexdigest()


def commit(staging: Path, final: Path, alive: HeartbeatCallback = no_heartbeat, aside: Path | None = None) -> None:
    """Rename the folder `staging` to `final` durably; what is at `final` is moved to `aside` first, then deleted.

    `alive` is called after each file. `aside` is next to `final` by default; a caller to whom that folder does not
    belong names a place in its own.
    """
    for path in _list_files(staging):
        # safetensors writes 0600, which neither the API's user nor an operator's group could read.
        path.chmod(0o644)
        _sync_to_disk(path)
        alive()
    for folder in {staging, *(path.parent for path in _list_files(staging))}:
        _sync_to_disk(folder)
    aside = aside or final.with_name(f".{final.name}.old")
    remove_tree(aside, ignore_errors=True)
    if os.path.lexists(final):
        final.rename(aside)
    staging.rename(final)
    remove_tree(aside, ignore_errors=True)
    _sync_to_disk(final.parent)


def verify(folder: Path, manifest_sha256: str, alive: HeartbeatCallback = no_heartbeat) -> list[str]:
    """Return what is wrong with a checkpoint, in sentences; empty if every byte is as it was written.

    The folder may belong to a hostile process, which may also have written the manifest. `alive` is called after each
    file and each piece of one.

    Raises:
        OSError: it cannot be read here at the moment, which says nothing about the checkpoint.
    """
    try:
        text = read_below(folder, MANIFEST, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return [f"{MANIFEST} is missing"]
    except OutsideStorage as error:
        return [f"{MANIFEST} cannot be used: {error}"]
    if hashlib.sha256(text).hexdigest() != manifest_sha256:
        return [f"{MANIFEST} is not the one that was written with this checkpoint"]
    try:
        expected = parse_manifest(text)
    except ValueError as error:  # `OutsideStorage` is one
        return [f"{MANIFEST} does not describe this checkpoint: {error}"]
    return find_differences(folder, expected, alive)


def is_in_place(folder: Path, manifest_sha256: str, step: int) -> bool:
    """Return True if a folder has this manifest, of a checkpoint at `step`, and files of the sizes that it names.

    Unlike `verify`, it does not read the files, which takes seconds for each GiB.
    """
    try:
        text = read_below(folder, MANIFEST, MAX_BYTES)
        expected = parse_manifest(text)
        if hashlib.sha256(text).hexdigest() != manifest_sha256 or json.loads(text).get("step") != step or not expected:
            return False
        return all(_size_below(folder, name) == size for name, (size, _) in expected.items())
    except (OSError, ValueError):
        return False


def _size_below(folder: Path, name: str) -> int:
    descriptor = open_below(folder, name)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def find_differences(
    folder: Path, expected: Mapping[str, tuple[int, str]], alive: HeartbeatCallback = no_heartbeat
) -> list[str]:
    """Return in which files a folder differs from size and SHA-256 of each, in sentences; raises as `verify` does."""
    present = _present_files(folder, expected, alive)
    problems = [f"{_printable_name(name)} is not part of it" for name in present - expected.keys()]
    for name, (size, sha256) in expected.items():
        problem = _problem_of(folder, name, size, sha256, alive) if name in present else "is missing"
        if problem:
            problems.append(f"{_printable_name(name)} {problem}")
    return problems


def _present_files(folder: Path, expected: Container[str], alive: HeartbeatCallback) -> set[str]:
    """Return the names of the files in the folder, only a few of them beyond those expected: it may have any number."""
    present, extra = set(), 0
    for name, status in entries_below(folder):
        alive()
        if status is None or (name == MANIFEST and name not in expected):
            continue
        if name not in expected:
            extra += 1
            if extra > _MAX_EXTRA:
                continue
        present.add(name)
    return present


def _problem_of(folder: Path, name: str, size: int, sha256: str, alive: HeartbeatCallback) -> str | None:
    try:
        descriptor = open_below(folder, name)
    except OutsideStorage as error:
        return f"cannot be used: {error}"
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if (actual_size := os.fstat(descriptor).st_size) != size:
            return f"has {actual_size} bytes instead of {size}"
        return None if _sha256_of(file, alive) == sha256 else "has other contents than were written"


def _printable_name(name: str) -> str:
    """Return a file name that a hostile process has chosen in a form that can be stored and printed."""
    return name if name.isprintable() and len(name) <= _LONGEST_NAME else ascii(name[:_LONGEST_NAME])


def _list_files(folder: Path) -> Iterator[Path]:
    return iter(sorted(Path(entry.path) for entry in files_below(folder) if entry.is_file(follow_symlinks=False)))


def _read_sha256(path: Path, alive: HeartbeatCallback) -> str:
    with path.open("rb", buffering=0) as file:
        return _sha256_of(file, alive)


def _sha256_of(file: FileIO, alive: HeartbeatCallback) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    while size := file.readinto(piece):
        digest.update(piece[:size])
        alive()
    return digest.hexdigest()


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
