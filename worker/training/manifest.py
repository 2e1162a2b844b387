"""What makes a checkpoint whole: a list of its files with sizes and hashes, and a commit in one rename.

A folder with a missing or changed file resumes silently wrong, with exit code 0; only the manifest tells.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

NAME = "manifest.json"
_VERSION = 1
_BLOCK = 1 << 20


def write_manifest(folder: Path, step: int, extra: dict[str, Any]) -> str:
    """Write `manifest.json` over every file below `folder`, all of them flushed to disk.

    `extra` is kept beside step and files (versions, sampler position). Returns the SHA-256 of the manifest,
    which the database keeps: it vouches for every byte of the checkpoint. Raises OSError on a full disk.
    """
    files = {}
    for path in _files(folder):
        size, digest = _hash(path, sync=True)
        files[path.relative_to(folder).as_posix()] = {"bytes": size, "sha256": digest}
    about = {"version": _VERSION, "step": step, "files": files, "extra": extra}
    text = json.dumps(about, indent=1, sort_keys=True).encode()
    path = folder / NAME
    path.write_bytes(text)
    _sync(path)
    return hashlib.sha256(text).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: version, step, files, extra. Verify it first."""
    manifest: dict[str, Any] = json.loads((folder / NAME).read_text())
    return manifest


def verify(folder: Path, manifest_sha256: str) -> list[str]:
    """Everything wrong with a checkpoint, one sentence each; empty: it is byte for byte what was saved."""
    try:
        text = (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return [f"{NAME} is missing"]
    if hashlib.sha256(text).hexdigest() != manifest_sha256:
        return [f"{NAME} is not the one that was recorded"]
    files: dict[str, dict[str, Any]] = json.loads(text)["files"]
    wrong = []
    present = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    for name, noted in sorted(files.items()):
        path = present.pop(name, None)
        if path is None:
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != noted["bytes"]:
            wrong.append(f"{name} has {path.stat().st_size} bytes instead of {noted['bytes']}")
        elif _hash(path, sync=False)[1] != noted["sha256"]:
            wrong.append(f"{name} has changed")
    return wrong + [f"{name} is not in the manifest" for name in sorted(present)]


def commit(temp: Path, final: Path) -> None:
    """Make the complete folder `temp` appear as `final`, durably: before the rename nothing, after it all.

    Raises OSError when `final` holds files already.
    """
    for folder, _, _ in os.walk(temp):
        _sync(Path(folder))
    temp.rename(final)
    _sync(final.parent)


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if (path.is_symlink() or not path.is_dir()) and path != folder / NAME
    )


def _hash(path: Path, *, sync: bool) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
        if sync:
            os.fsync(file.fileno())
    return size, digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
