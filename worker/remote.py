"""Whole checkpoints in a second storage, any that fsspec knows: sent manifest last, fetched as they were written."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from app.home import HomeError
from app.storage import Storage
from worker.training import manifest

_PIECE = 4 * 2**20
_MOST_MANIFEST = 16 * 2**20
_MOST_WHY = 300
_OPTIONS: dict[str, dict[str, Any]] = {
    # Its own answer to a store that is away is to wait for minutes; we have pauses of our own, and can say so.
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 2}},
    }
}


class Unreachable(Exception):
    """The second storage does not answer, or not to us; what is there may be as good as ever."""


class NotThere(Exception):
    """The second storage has no such checkpoint."""


class BadCopy(Exception):
    """What the second storage has is not what was written."""


class NotAsWritten(Exception):
    """What is to be sent is gone, or not as it was written: of no use as a copy."""


class Remote:
    """The second storage. Paths below it are those below the first, made from ids by `Storage` alone."""

    def __init__(self, url: str, storage: Storage) -> None:
        """Connects to nothing yet.

        Raises:
            HomeError: nothing here knows such URLs.
        """
        self.url = url
        protocol = url.partition("://")[0]
        try:
            self._files, root = fsspec.url_to_fs(url, **_OPTIONS.get(protocol, {}))
        except (ImportError, ValueError) as error:
            more = " (for S3: pip install 'anneal[s3]')" if protocol.startswith("s3") else ""
            raise HomeError(f"ANNEAL_CHECKPOINT_URL={url} cannot be used: {error}{more}") from error
        self._root = str(root).rstrip("/")
        self._is_local = "file" in self._protocols()
        self._storage = storage

    def send(self, folder: Path, sha256: str, on_piece: Callable[[], None]) -> None:
        """Copy a checkpoint, its manifest last: before that, nothing takes what is there for a checkpoint.

        Each byte is hashed on its way, and none is read through a link: the folder is its trainer's own. `on_piece` is
        called often; what it raises ends the sending.

        Raises:
            NotAsWritten: the folder is gone or damaged.
            Unreachable: the second storage took no more.
        """
        with _as_written(folder):
            text = b"".join(_local_pieces(folder, manifest.MANIFEST))
        if hashlib.sha256(text).hexdigest() != sha256:
            raise NotAsWritten(f"{folder.name}: {manifest.MANIFEST} is not the one that was written with it")
        target = self._place(folder)
        with self._answering():
            self._check_root()
        with _as_written(folder):
            listed = _listed(text, folder)
        for name, size, digest in listed:
            self._put(f"{target}/{name}", _hashed(folder, name, (size, digest), on_piece))
        self._put(f"{target}/{manifest.MANIFEST}", iter([text]))

    def fetch(self, folder: Path, sha256: str, own_name: str, on_piece: Callable[[], None]) -> None:
        """Make `folder` what it was when it was written: beside it first, verified to the last byte, then renamed.

        `own_name` is the fetching worker's, for a place that no other one uses.

        Raises:
            NotThere, BadCopy, Unreachable: as they say; nothing is left here of what came.
            OSError: this worker's own storage cannot take it.
        """
        source = self._place(folder)
        text = b"".join(self._get(f"{source}/{manifest.MANIFEST}", _MOST_MANIFEST))
        if hashlib.sha256(text).hexdigest() != sha256:
            raise BadCopy(f"{manifest.MANIFEST} of the copy is not the one that was written with the checkpoint")
        staging = folder.with_name(f".{folder.name}.{own_name}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            for name, size, _ in _listed(text, staging):
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                with (staging / name).open("xb") as file:
                    for piece in self._get(f"{source}/{name}", size):
                        file.write(piece)
                        on_piece()
            (staging / manifest.MANIFEST).write_bytes(text)
            wrong = manifest.verify(staging, sha256, on_piece)
            if wrong:
                raise BadCopy(f"of the copy, {'; '.join(wrong[:3])}")
            manifest.commit(staging, folder, on_piece)
        except NotThere as error:
            raise BadCopy(f"of the copy, {error} is missing") from error
        except ValueError as error:
            raise BadCopy(f"of the copy, {error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def remove(self, folder: Path) -> None:
        """Remove the copy of a checkpoint, or of everything of a run; no error where there is none.

        Raises:
            Unreachable: something may be left.
        """
        with self._answering():
            self._check_root()
            with suppress(FileNotFoundError):
                self._files.rm(self._place(folder), recursive=True)

    def _place(self, folder: Path) -> str:
        return f"{self._root}/{self._storage.key_of(folder)}"

    def _put(self, path: str, pieces: Iterator[bytes]) -> None:
        if self._is_local:  # object stores have no folders
            with self._answering():
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._answering():
            file = self._files.open(path, "wb")
        with self._answering(), file:
            for piece in pieces:
                file.write(piece)

    def _get(self, path: str, most: int) -> Iterator[bytes]:
        """The pieces of a file, no more of it than `most` and one more: what is too long need not be fetched."""
        with self._answering():
            self._check_root()
            try:
                file = self._files.open(path, "rb", block_size=_PIECE)
            except FileNotFoundError as error:
                raise NotThere(path.rpartition("/")[2]) from error
        with file:
            taken = 0
            while taken <= most:
                with self._answering():
                    try:
                        piece: bytes = file.read(_PIECE)
                    except FileNotFoundError as error:
                        raise NotThere(path.rpartition("/")[2]) from error
                if not piece:
                    return
                taken += len(piece)
                yield piece

    def _check_root(self) -> None:
        # A share that is not mounted must not be replaced by a folder of the same name on this machine's own disk.
        if self._is_local and not Path(self._root).is_dir():
            raise Unreachable(f"the folder {self._root} is not there: mount it, or make it")

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._files.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Whatever a library of a store raises means that it cannot be used now."""
        try:
            yield
        except (Unreachable, NotThere, NotAsWritten, Stopped):
            raise
        except Exception as error:
            raise Unreachable(f"{type(error).__name__}: {error}"[:_MOST_WHY]) from error


class Stopped(Exception):
    """Whoever sends or fetches has been told to end."""


def _listed(text: bytes, folder: Path) -> list[tuple[str, int, str]]:
    """Names, sizes and hashes in a manifest; ValueError (`OutsideStorage` is one) for what no manifest of ours says.

    A trainer has written it, and a name in it becomes a path, here and in the second storage.
    """
    try:
        listed = [
            (name, int(facts["bytes"]), str(facts["sha256"])) for name, facts in json.loads(text)["files"].items()
        ]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{manifest.MANIFEST} is none of ours: {error!r}") from error
    for name, _, _ in listed:
        Storage.resolve_below(folder, name)
    return listed


def _hashed(folder: Path, name: str, wanted: tuple[int, str], on_piece: Callable[[], None]) -> Iterator[bytes]:
    digest, size = hashlib.sha256(), 0
    with _as_written(folder):
        for piece in _local_pieces(folder, name):
            digest.update(piece)
            size += len(piece)
            on_piece()
            yield piece
    if (size, digest.hexdigest()) != wanted:
        raise NotAsWritten(f"{folder.name}: {name} has other contents than were written")


def _local_pieces(folder: Path, name: str) -> Iterator[bytes]:
    with os.fdopen(Storage.open_below(folder, name), "rb") as file:
        while piece := file.read(_PIECE):
            yield piece


@contextmanager
def _as_written(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # `OutsideStorage` is one
        raise NotAsWritten(f"{folder.name}: {error}") from error
