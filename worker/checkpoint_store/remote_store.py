"""Remote store of whole checkpoints, on any file system that fsspec supports.

A checkpoint is sent with its manifest last, and fetched exactly as it was written.
"""

import errno
import hashlib
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import fsspec
from fsspec.spec import AbstractBufferedFile

from app.infra.errors import SetupError
from app.infra.storage import Storage, fsync
from app.infra.untrusted_folder import create_below, open_below
from worker.checkpoint_files import manifest

_SILENT = {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESTALE, errno.ENOTCONN}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_CREDENTIALS_TYPES = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}


log = logging.getLogger(__name__)

MARK = ".anneal-checkpoints"
"""File in a folder that is meant to hold replicas. The mount point of a share that is not mounted has none."""
_PIECE_BYTES = 4 * 2**20
_MAX_LOGGED = 1000
_PART = ".part"
_SILENCE_SECONDS = 20.0


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """Create a socket whose sends time out too.

    The timeouts of libraries concern reading only, but a store that accepts no more data must not block the sender.
    """
    made = socket.socket(*address[:3])
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_SILENCE_SECONDS * 1000))
    return made


def _options(protocol: str) -> dict[str, Any]:
    if protocol != "s3":
        return {}
    # The callers have their own pauses and report them: a request to a silent store ends soon.
    config = {
        "connect_timeout": 5,
        "read_timeout": _SILENCE_SECONDS,
        "retries": {"mode": "standard", "total_max_attempts": 2},
        "connector_args": {"socket_factory": _socket},
    }
    from aiobotocore.session import AioSession
    from botocore.handlers import add_expect_header

    session = AioSession()
    # Waiting for the store's permission to send a body has no timeout there: a silent store would block it forever.
    session.unregister("before-call.s3", add_expect_header)
    return {"use_listings_cache": False, "config_kwargs": config, "session": session}


class TransferCancelled(Exception):
    """The sender or fetcher was asked to end."""


class StoreUnavailable(Exception):
    """The remote store does not answer, or refuses this worker; its contents may be intact.

    The text is a clause that is safe to show to any user.
    """

    def __init__(self, clause: str, is_silent: bool = False) -> None:
        super().__init__(clause)
        self.is_silent = is_silent
        """True if nothing answers at all, so that the next request need not be tried."""


class ReplicaMissing(Exception):
    """The remote store has no such checkpoint."""


class ReplicaCorrupt(Exception):
    """The replica in the remote store differs from what was written."""


class LocalCheckpointMissing(Exception):
    """The checkpoint to send no longer exists here."""


class LocalCheckpointCorrupt(Exception):
    """The checkpoint to send differs from what was written, so a replica of it would be useless."""


class RemoteStore:
    """Remote store; its paths are those below the storage root, made from ids by `Storage` alone."""

    def __init__(self, url: str, storage: Storage) -> None:
        """Set up the client; nothing is connected yet.

        Raises:
            SetupError: No installed library supports the URL.
        """
        self.url = url
        protocol = url.partition("://")[0]
        try:
            self._files, root = fsspec.url_to_fs(url, **_options(protocol))
        except (ImportError, ValueError) as error:
            install = " (for S3: `pip install -c constraints.txt -e '.[s3]'` in the clone of Anneal)"
            more = install if protocol.startswith("s3") else ""
            raise SetupError(f"ANNEAL_CHECKPOINT_URL={url} cannot be used: {error}{more}") from error
        if protocol == "s3":
            self._files.retries = 1  # its own retries, each of which includes all tries of the library below it
        self._root = str(root).rstrip("/")
        self._is_local = "file" in self._protocols()
        self._storage = storage

    def mark_root(self, is_first: Callable[[], bool]) -> None:
        """Create the marker in a folder that has none, if `is_first()` says that no replica was ever made.

        Raises:
            StoreUnavailable: The folder does not exist, or it is not the one that holds the replicas.
        """
        if self._is_local and not Path(self._root, MARK).exists() and Path(self._root).is_dir() and is_first():
            with self._store_errors():
                Path(self._root, MARK).touch()
                fsync(Path(self._root))
        self._check_root()

    def send(self, folder: Path, sha256: str, on_piece: Callable[[], None]) -> None:
        """Send a checkpoint, its manifest last: before that, no reader takes the files for a checkpoint.

        Each byte is hashed on its way, and none is read through a link, because the folder belongs to its trainer.
        `on_piece` is called often; an exception that it raises ends the transfer, and nothing of the current file
        arrives.

        Raises:
            LocalCheckpointMissing: The folder does not exist here.
            LocalCheckpointCorrupt: The checkpoint is corrupt.
            OSError: It cannot be read here and now, which says nothing about its state.
            StoreUnavailable: The remote store accepts no more.
        """
        text = b"".join(_local_pieces(folder, manifest.MANIFEST))
        if hashlib.sha256(text).hexdigest() != sha256:
            raise LocalCheckpointCorrupt(f"{folder.name}: {manifest.MANIFEST} is not the one that was written with it")
        target = self._place(folder)
        self._check_root()
        with _local_errors(folder):
            listed = manifest.listed(text)
        if self._is_local:
            with self._store_errors():
                for left in Path(target).rglob(f".*{_PART}"):
                    left.unlink()  # left by a killed process
        for name, wanted in listed.items():
            self._put(f"{target}/{name}", _hashed(folder, name, wanted, on_piece))
        self._put(f"{target}/{manifest.MANIFEST}", iter([text]))

    def fetch(self, folder: Path, sha256: str, own_name: str, on_piece: Callable[[], None]) -> None:
        """Restore `folder` as it was written: staged, verified to the last byte, then renamed.

        The parent of `folder` belongs to the user that trains, who could put a link in the place of anything there, so
        the checkpoint is staged in a folder that only this worker may write. `own_name` identifies the fetch, so that
        no other one uses the same staging folder.

        Raises:
            ReplicaMissing, ReplicaCorrupt, StoreUnavailable: See these; nothing that was fetched is left here.
            OSError: This worker's own storage cannot take it.
        """
        source = self._place(folder)
        text = b"".join(self._get(f"{source}/{manifest.MANIFEST}", manifest.MAX_BYTES))
        if hashlib.sha256(text).hexdigest() != sha256:
            raise ReplicaCorrupt(
                f"{manifest.MANIFEST} of the replica is not the one that was written with the checkpoint"
            )
        own = self._storage.fetch_dir(folder, own_name)
        staging = own / folder.name
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True, mode=0o700)
        try:
            staging.mkdir()
            for name, (size, _) in manifest.listed(text).items():
                with _created(staging, name) as file:
                    for piece in self._get(f"{source}/{name}", size):
                        file.write(piece)
                        on_piece()
            with _created(staging, manifest.MANIFEST) as file:
                file.write(text)
            wrong = manifest.verify(staging, sha256, on_piece)
            if wrong:
                raise ReplicaCorrupt(f"the replica is corrupt: {'; '.join(wrong[:3])}")
            folder.parent.mkdir(exist_ok=True)
            manifest.commit(staging, folder, on_piece, aside=own / "replaced")
        except ReplicaMissing as error:
            raise ReplicaCorrupt(f"the replica is corrupt: {error} is missing") from error
        except ValueError as error:
            raise ReplicaCorrupt(f"the replica is corrupt: {error}") from error
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def remove(self, folder: Path) -> None:
        """Remove the replica of a checkpoint, or of everything of a run; no error if there is none.

        Raises:
            StoreUnavailable: Something may be left.
        """
        self._check_root()
        with self._store_errors(), suppress(FileNotFoundError):
            self._files.rm(self._place(folder), recursive=True)

    def _place(self, folder: Path) -> str:
        return f"{self._root}/{self._storage.key_of(folder)}"

    def _put(self, path: str, pieces: Iterator[bytes]) -> None:
        if self._is_local:
            return self._put_durably(Path(path), pieces)
        with self._store_errors():
            file = self._files.open(path, "wb")
        try:
            for piece in pieces:
                with self._store_errors():
                    file.write(piece)
            with self._store_errors():
                file.close()
        except BaseException:
            _discard(file)
            raise

    def _put_durably(self, path: Path, pieces: Iterator[bytes]) -> None:
        """Write into a local folder: a file appears under its name only when it is complete and on disk."""
        part = path.with_name(f".{path.name}.{uuid4().hex}{_PART}")
        with self._store_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            file = part.open("xb")
        try:
            with file:
                for piece in pieces:
                    with self._store_errors():
                        file.write(piece)
                with self._store_errors():
                    file.flush()
                    os.fsync(file.fileno())
            with self._store_errors():
                part.replace(path)
                for folder in path.parents:
                    _fsync_folder(folder)
                    if folder == Path(self._root):
                        break
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    def _get(self, path: str, most: int) -> Iterator[bytes]:
        """Yield a file in pieces, ending with the first piece beyond `most` bytes: the rest need not be fetched."""
        self._check_root()
        with self._store_errors():
            try:
                file = self._files.open(path, "rb", block_size=_PIECE_BYTES)
            except FileNotFoundError as error:
                raise ReplicaMissing(path.rpartition("/")[2]) from error
        with file:
            taken = 0
            while taken <= most:
                with self._store_errors():
                    try:
                        piece: bytes = file.read(_PIECE_BYTES)
                    except FileNotFoundError as error:
                        raise ReplicaMissing(path.rpartition("/")[2]) from error
                if not piece:
                    return
                taken += len(piece)
                yield piece

    def _check_root(self) -> None:
        # A share that is not mounted must not be replaced by a folder of the same name on this machine's own disk.
        if not self._is_local:
            return
        if not Path(self._root).is_dir():
            raise StoreUnavailable(f"the folder {self._root} does not exist: mount it or create it", is_silent=True)
        if not Path(self._root, MARK).exists():
            raise StoreUnavailable(
                f"the folder {self._root} has no file {MARK}: mount the share that belongs there, or create that file "
                "if replicas are to be stored there",
                is_silent=True,
            )

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._files.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Convert any exception into `StoreUnavailable`: the store cannot be used now. For calls of libraries only."""
        try:
            yield
        except ReplicaMissing:
            raise
        except Exception as error:
            log.warning("%s: %s", self.url, f"{type(error).__name__}: {error}"[:_MAX_LOGGED])
            raise StoreUnavailable(*describe_store_error(error)) from error


def _created(folder: Path, name: str) -> BinaryIO:
    """Create a file of a replica; raise ValueError if the manifest, which a trainer wrote, names it a second time."""
    try:
        return os.fdopen(create_below(folder, name), "wb")
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{manifest.MANIFEST} names {name!r} twice") from error


def _hashed(folder: Path, name: str, wanted: tuple[int, str], on_piece: Callable[[], None]) -> Iterator[bytes]:
    digest, size = hashlib.sha256(), 0
    for piece in _local_pieces(folder, name):
        digest.update(piece)
        size += len(piece)
        on_piece()
        yield piece
    if (size, digest.hexdigest()) != wanted:
        raise LocalCheckpointCorrupt(f"{folder.name}: {name} has other contents than were written")


def _local_pieces(folder: Path, name: str) -> Iterator[bytes]:
    with _local_errors(folder):
        file = os.fdopen(open_below(folder, name), "rb")
    with file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


@contextmanager
def _local_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # `OutsideStorage` is a ValueError
        if not folder.exists():
            raise LocalCheckpointMissing(folder.name) from error
        raise LocalCheckpointCorrupt(f"{folder.name}: {error}") from error


def _discard(file: Any) -> None:
    """Discard a partly written file, so that nothing of it arrives in the store."""
    with suppress(Exception):  # the store removes the rest by itself
        if hasattr(file, "discard"):
            file.discard()
    if isinstance(file, AbstractBufferedFile):
        file.closed = True  # closing it would complete the upload
    else:
        file.close()


def _fsync_folder(folder: Path) -> None:
    try:
        fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support it
            raise


# By name, because the packages that raise these are optional.
_SILENT_TYPES = {"HTTPClientError", "ConnectionError", "ClientConnectionError", "gaierror"}


def describe_store_error(error: Exception) -> tuple[str, bool]:
    """Describe an error of the remote store in a clause, and return True with it if nothing answers there at all."""
    names = {kind.__name__ for kind in type(error).__mro__}
    number = error.errno if isinstance(error, OSError) else None
    if names & _NO_CREDENTIALS_TYPES:
        return "this worker has no credentials for it", True
    if isinstance(error, PermissionError) or number == errno.EROFS:
        return "it refuses this worker: check its credentials and its permissions there", False
    if isinstance(error, TimeoutError) or names & _SILENT_TYPES or number in _SILENT:
        return "it does not answer", True
    if isinstance(error, FileNotFoundError):
        return "the location does not exist", False
    if number in _FULL:
        return "it has no space left", False
    return f"it answers with an error ({type(error).__name__})", False
