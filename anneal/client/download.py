"""Download of a run's output: atomic, and resumed without fetching the same bytes twice."""

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import quote

from anneal.client.errors import AnnealError
from anneal.client.transport import Backoff, Session
from anneal.contracts.schemas.artifacts import Artifact

ProgressCallback = Callable[[str, int, int], None]

_SHA256_ETAG = re.compile('"([0-9a-f]{64})"')
_PIECE_BYTES = 2**20


async def download_files(
    session: Session,
    place: str,
    run_id: str,
    artifacts: list[Artifact],
    folder: Path,
    paths: Sequence[str],
    on_progress: ProgressCallback | None,
) -> Path:
    """Download files of a run, served below the path `place`, into `folder`.

    Files are collected in a hidden subfolder named after the run and moved into place together. After an interruption,
    the subfolder holds only files of this run, and no partial model can be loaded.
    """
    selected = [artifact for artifact in artifacts if not paths or any(fnmatch(artifact.path, path) for path in paths)]
    if not selected:
        there = ", ".join(artifact.path for artifact in artifacts)
        raise AnnealError("artifact_not_found", f"Run {run_id} has no file {', '.join(paths)}. Its files: {there}.")
    collected = folder / f".{run_id}.part"
    for artifact in selected:
        _check_path(artifact.path)
        part = collected / artifact.path
        _make_room(part)
        await _fetch_file(session, f"{place}/{quote(artifact.path)}", part, artifact, on_progress)
    for artifact in selected:
        _move_into_place(collected / artifact.path, folder / artifact.path)
    shutil.rmtree(collected)  # noqa: TID251 - what this call has made
    return folder


async def download_file(session: Session, path: str, target: Path) -> Path:
    """Download one response into a file, which appears when it is complete."""
    part = target.with_name(f".{target.name}.part")
    response = await session.attempt_once(session.transport.build_request("GET", path))
    try:
        with part.open("wb") as file:
            async with aclosing(session.transport.iterate_chunks(response)) as chunks:
                async for chunk in chunks:
                    file.write(chunk)
        part.replace(target)
    finally:
        await session.transport.close_response(response)
        part.unlink(missing_ok=True)
    return target


async def _fetch_file(
    session: Session, path: str, part: Path, artifact: Artifact, on_progress: ProgressCallback | None
) -> None:
    """Download the missing part of one file; after a lost connection, continue from the last byte.

    A file of several responses is compared with its SHA-256, if the service has sent it, and downloaded again if it
    differs: the service compares no more than the bytes of each response.
    """
    backoff = Backoff()
    heard = time.monotonic()
    with _open_part(part) as file:
        while (there := _size_of(file)) != artifact.bytes:
            if there > artifact.bytes:
                file.truncate(0)
                continue
            try:
                sha256 = await _append_missing(session, path, file, there, artifact, on_progress)
                if there and sha256 is not None and await _hash_file(session, file) != sha256:
                    file.truncate(0)
                elif _size_of(file) != artifact.bytes:
                    raise AnnealError(
                        "download_changed",
                        f"{artifact.path} has {_size_of(file):,} bytes instead of {artifact.bytes:,}: it changed "
                        "during the download. Download it again.",
                    )
            except AnnealError as error:
                if _size_of(file) > there:
                    heard = time.monotonic()
                    backoff.reset()
                wait = backoff.next_delay(error.retry_after)
                if not error.is_transient or time.monotonic() - heard + wait > session.patience:
                    raise
                await session.transport.pause(wait)
        if on_progress:
            on_progress(artifact.path, artifact.bytes, artifact.bytes)


async def _append_missing(
    session: Session, path: str, file: BinaryIO, there: int, artifact: Artifact, on_progress: ProgressCallback | None
) -> str | None:
    """Append the rest of a file; return the SHA-256 of the whole, if the response has it."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={there}-"} if there else {})
    response = await session.attempt_once(session.transport.build_request("GET", path, headers=headers))
    try:
        if response.status_code != 206:
            file.truncate(0)  # the response starts at the first byte
        async with aclosing(session.transport.iterate_chunks(response)) as chunks:
            async for chunk in chunks:
                file.write(chunk)
                if on_progress:
                    on_progress(artifact.path, _size_of(file), artifact.bytes)
        etag = _SHA256_ETAG.fullmatch(response.headers.get("ETag", ""))
        return etag[1] if etag else None
    finally:
        await session.transport.close_response(response)


async def _hash_file(session: Session, file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
        await session.transport.pause(0)  # other tasks of an event loop go on
    return digest.hexdigest()


def _check_path(path: str) -> None:
    """Refuse a path outside the folder: paths from the service are untrusted."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise AnnealError(
            "bad_path", f"The service returned the file path {path!r}, which is outside the target folder."
        )


def _open_part(part: Path) -> BinaryIO:
    return part.open("a+b", buffering=0)


def _size_of(file: BinaryIO) -> int:
    return file.seek(0, 2)


def _make_room(part: Path) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)


def _move_into_place(part: Path, place: Path) -> None:
    _make_room(place)
    part.replace(place)
