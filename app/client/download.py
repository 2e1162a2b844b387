"""Fetching the output of a run: all of it or nothing, and never the same bytes twice."""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import quote

from app.artifacts.schemas import Artifact
from app.client.errors import AnnealError
from app.client.transport import Backoff, Session

Told = Callable[[str, int, int], None]


async def download(
    session: Session, run_id: str, artifacts: list[Artifact], folder: Path, paths: Sequence[str], told: Told | None
) -> Path:
    """Fetch files of a run into `folder`.

    They are collected in a folder of their own below it, named by the run, and moved into place together: what is
    found there after an interruption belongs to this run, and nobody loads half a model.
    """
    wanted = [artifact for artifact in artifacts if not paths or any(fnmatch(artifact.path, path) for path in paths)]
    if not wanted:
        there = ", ".join(artifact.path for artifact in artifacts)
        raise AnnealError("artifact_not_found", f"Run {run_id} has no file {', '.join(paths)}; it has {there}.")
    collected = folder / f".{run_id}.part"
    for artifact in wanted:
        _check_path(artifact.path)
        part = collected / artifact.path
        _make_room(part)
        await _fetch(session, f"/runs/{run_id}/artifacts/{quote(artifact.path)}", part, artifact, told)
    for artifact in wanted:
        _put(collected / artifact.path, folder / artifact.path)
    shutil.rmtree(collected)
    return folder


async def _fetch(session: Session, path: str, part: Path, artifact: Artifact, told: Told | None) -> None:
    """Fetch what is still missing of one file, in as many pieces as the connection breaks it into."""
    backoff = Backoff()
    heard = time.monotonic()
    with _opened(part) as file:
        while (there := _size(file)) != artifact.bytes:
            if there > artifact.bytes:
                file.truncate(0)
                continue
            try:
                await _append(session, path, file, there, artifact, told)
                if _size(file) != artifact.bytes:
                    raise AnnealError(
                        "download_changed",
                        f"{artifact.path} has {_size(file):,} bytes and not {artifact.bytes:,}: it was changed "
                        "meanwhile. Download again.",
                    )
            except AnnealError as error:
                if _size(file) > there:
                    heard = time.monotonic()
                    backoff.reset()
                wait = backoff.next(error.retry_after)
                if not error.is_passing or time.monotonic() - heard + wait > session.patience:
                    raise
                await session.transport.pause(wait)
        if told:
            told(artifact.path, artifact.bytes, artifact.bytes)


async def _append(
    session: Session, path: str, file: BinaryIO, there: int, artifact: Artifact, told: Told | None
) -> None:
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={there}-"} if there else {})
    response = await session.attempt(session.transport.build("GET", path, headers=headers))
    try:
        if response.status_code != 206:
            file.truncate(0)  # it sends the file from its beginning
        async with aclosing(session.transport.chunks(response)) as chunks:
            async for chunk in chunks:
                file.write(chunk)
                if told:
                    told(artifact.path, _size(file), artifact.bytes)
    finally:
        await session.transport.release(response)


def _check_path(path: str) -> None:
    """The service's word is not enough to write outside the folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise AnnealError("bad_path", f"The service names a file {path!r}, which would lie outside the folder.")


def _opened(part: Path) -> BinaryIO:
    return part.open("ab", buffering=0)


def _size(file: BinaryIO) -> int:
    return file.seek(0, 2)


def _make_room(part: Path) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)


def _put(part: Path, place: Path) -> None:
    _make_room(place)
    part.replace(place)
