"""Atomic folders: a checkpoint or an output is written completely or not at all, and verified by its manifest.

Order: files → fsync each → `manifest.json` (size and SHA-256 of each file) → fsync → rename → fsync the parent.
Imports nothing heavy: the supervisor verifies checkpoints with it before it offers one for a resume.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from worker.wire.heartbeat import HeartbeatCallback, no_heartbeat

MANIFEST = "manifest.json"
_FORMAT = 1
_PIECE = 1 << 20


def write_manifest(folder: Path, step: int, facts: Mapping[str, Any], alive: HeartbeatCallback = no_heartbeat) -> str:
    """Sync every file of `folder` to the disk and describe it; return the SHA-256 of the manifest itself.

    `alive` is called after each file is on the disk, and for each piece of it that is read.

    Raises:
        OSError: the disk refused the write (full, read-only).
    """
    files = {}
    for path in _files(folder):
        _sync(path)
        alive()
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _digest(path, alive)}
    text = json.dumps({"format": _FORMAT, "step": step, "files": files, **facts}, indent=1).encode()
    path = folder / MANIFEST
    path.write_bytes(text)
    _sync(path)
    return hashlib.sha256(text).hexdigest()


def commit(staging: Path, final: Path, alive: HeartbeatCallback = no_heartbeat) -> None:
    """Rename the folder `staging` to `final` durably; an existing `final` is moved away first, then deleted.

    `alive` is called after each file.
    """
    for path in _files(staging):
        # safetensors writes 0600, which neither the API's user nor an operator's group could read.
        path.chmod(0o644)
        _sync(path)
        alive()
    for folder in {staging, *(path.parent for path in _files(staging))}:
        _sync(folder)
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        staging.rename(final)
        shutil.rmtree(old)
    else:
        staging.rename(final)
    _sync(final.parent)


def verify(folder: Path, manifest_sha256: str, alive: HeartbeatCallback = no_heartbeat) -> list[str]:
    """Return what is wrong with a checkpoint, in sentences; empty if every byte is as it was written.

    `alive` is called after each file and each piece of one.

    Raises:
        OSError: it cannot be read here at the moment, which says nothing about the checkpoint.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return [f"{MANIFEST} is missing"]
    if hashlib.sha256(text).hexdigest() != manifest_sha256:
        return [f"{MANIFEST} is not the one that was written with this checkpoint"]
    expected = json.loads(text)["files"]
    present = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    problems = [f"{name} is not part of it" for name in present.keys() - expected.keys() - {MANIFEST}]
    for name, facts in expected.items():
        path = present.get(name)
        if path is None:
            problems.append(f"{name} is missing")
        elif path.stat().st_size != facts["bytes"]:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {facts['bytes']}")
        elif _digest(path, alive) != facts["sha256"]:
            problems.append(f"{name} has other contents than were written")
    return problems


def size_of(folder: Path) -> int:
    """Return the total size in bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


def _digest(path: Path, alive: HeartbeatCallback = no_heartbeat) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            digest.update(piece[:size])
            alive()
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
