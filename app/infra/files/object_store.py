"""Files below one URL, on any file system that fsspec supports: an object store or a share.

A file appears under its name only when it is complete. Keys are paths below the URL, and no key leads out of it.
"""

import errno
import io
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from app.infra.errors import SetupError
from app.infra.files.tree import files_below
from app.infra.files.untrusted_folder import OutsideStorage, refuse_outside

log = logging.getLogger(__name__)

MARK = ".anneal-checkpoints"
"""File in a folder that is meant to hold stored files. The mount point of a share that is not mounted has none."""
INSTALLATION_MARK = ".anneal-installation"
"""File with the id of the installation whose storage this is."""
PIECE_BYTES = 4 * 2**20
SMALL_PART_BYTES = 8 * 2**20
"""Part size of an upload that keeps the memory of many at a time low; a file may then have 80 GB (10,000 parts)."""
_MAX_LOGGED = 1000
_MAX_ID_BYTES = 100
_PART = ".part"
_SILENCE_SECONDS = 20.0
_SILENT = {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESTALE, errno.ENOTCONN}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_CREDENTIALS_TYPES = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}
# By name, because the packages that raise these are optional.
_SILENT_TYPES = {"HTTPClientError", "ConnectionError", "ClientConnectionError", "gaierror"}


class StoreUnavailable(Exception):
    """The store does not answer, or refuses this process; its contents may be intact.

    The text is a clause that is safe to show to any user.
    """

    def __init__(self, clause: str, is_silent: bool = False, is_refused: bool = False) -> None:
        super().__init__(clause)
        self.is_refused = is_refused
        """True if this process has no permission; others may have it."""
        self.is_silent = is_silent
        """True if nothing answers at all, so that the next request need not be tried."""


class StoreBusy(StoreUnavailable):
    """Too many calls of this process wait for the store."""


class WrongStore(StoreUnavailable):
    """The store is not marked as the one of this installation."""

    def __init__(self, clause: str, *, is_marked: bool) -> None:
        super().__init__(clause)
        self.is_marked = is_marked
        """True if it belongs to another installation; False if it has no mark, so that the API may set one."""


class ObjectMissing(Exception):
    """The store has no such file."""


@dataclass(frozen=True)
class ObjectFacts:
    """File in the store."""

    key: str
    bytes: int
    modified: float
    """Seconds since 1970, by the clock of the store."""


def _create_socket(address: tuple[Any, ...]) -> socket.socket:
    """Create a socket whose sends time out too.

    The timeouts of libraries concern reading only, but a store that accepts no more data must not block the sender.
    """
    created = socket.socket(*address[:3])
    created.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_SILENCE_SECONDS * 1000))
    return created


def _protocol_options(protocol: str) -> dict[str, Any]:
    if protocol != "s3":
        return {}
    # The callers have their own pauses and report them: a request to a silent store ends soon.
    config = {
        "connect_timeout": 5,
        "read_timeout": _SILENCE_SECONDS,
        "retries": {"mode": "standard", "total_max_attempts": 2},
        "connector_args": {"socket_factory": _create_socket},
    }
    from aiobotocore.session import AioSession
    from botocore.handlers import add_expect_header

    session = AioSession()
    # Waiting for the store's permission to send a body has no timeout there: a silent store would block it forever.
    session.unregister("before-call.s3", add_expect_header)
    return {"use_listings_cache": False, "config_kwargs": config, "session": session}


class ObjectStore:
    """Files below one URL. Every method may be called from any thread, and blocks."""

    def __init__(self, url: str, setting: str) -> None:
        """Set up the client; nothing is connected yet. `setting` is the variable that has the URL.

        Raises:
            SetupError: No installed library supports the URL.
        """
        import fsspec  # only where a URL is configured

        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            self.files, root = fsspec.url_to_fs(url, **_protocol_options(protocol))
        except (ImportError, ValueError) as error:
            install = " (for S3: `pip install -c constraints.txt -e '.[s3]'` in the clone of Anneal)"
            more = install if protocol.startswith("s3") else ""
            raise SetupError(f"{setting}={url} cannot be used: {error}{more}") from error
        if protocol == "s3":
            self.files.retries = 1  # its own retries, each of which includes all tries of the library below it
        self._root = str(root).rstrip("/")
        self.is_local = "file" in self._protocol_names()

    def path_of(self, key: str) -> str:
        """Return the path of a key in the file system; raise `OutsideStorage` for one that leads out of the URL."""
        refuse_outside(key)
        if "?versionId=" in key:  # s3fs would read another key, at that version
            raise OutsideStorage(f"a key must not contain `?versionId=`: {key!r}")
        return f"{self._root}/{key}"

    def mark_root(self) -> None:
        """Create the marker in a folder that has none, for its first files.

        Raises:
            StoreUnavailable: The folder does not exist.
        """
        if self.is_local and not Path(self._root, MARK).exists() and Path(self._root).is_dir():
            with self.store_errors():
                Path(self._root, MARK).touch()
                _fsync_folder(Path(self._root))
        self.check_root()

    def check_root(self) -> None:
        """Raise `StoreUnavailable` if the store is a folder that is not mounted."""
        # A share that is not mounted must not be replaced by a folder of the same name on this machine's own disk.
        if not self.is_local:
            return
        if not Path(self._root).is_dir():
            raise StoreUnavailable(f"the folder {self._root} does not exist: mount it or create it", is_silent=True)
        if not Path(self._root, MARK).exists():
            raise StoreUnavailable(
                f"the folder {self._root} has no file {MARK}: mount the share that belongs there, or create that file "
                "if files are to be stored there",
                is_silent=True,
            )

    def check_owner(self, installation: str | None) -> None:
        """Check that this is the storage of an installation; None: the database has no id yet.

        Raises:
            WrongStore: It is marked as that of another one, or not at all.
            StoreUnavailable: It does not answer.
        """
        try:
            owner = self.read(INSTALLATION_MARK, _MAX_ID_BYTES).decode("ascii", "replace").strip()
        except ObjectMissing:
            owner = ""
        except OutsideStorage:
            owner = "another content"
        if owner and owner == installation:
            return
        if owner:
            clause = (
                f"it belongs to another installation: its file {INSTALLATION_MARK} has {owner!r}, and the database "
                f"{installation!r}. Set ANNEAL_STORAGE to the storage of this installation, the same for the API and "
                "all workers"
            )
        else:
            clause = (
                f"it has no file {INSTALLATION_MARK}, which the API creates when it starts: set the same "
                "ANNEAL_STORAGE for the API and all workers"
            )
            if installation is not None:
                clause += (
                    f". If it has the files of this installation, create that file with the content {installation}"
                )
        raise WrongStore(clause, is_marked=bool(owner))

    def claim_for(self, installation: str, is_ours: Callable[[], bool]) -> None:
        """Mark a store that has no mark as the one of an installation, if `is_ours()` says so; then check it.

        Raises:
            WrongStore, StoreUnavailable: As `check_owner` raises them.
        """
        try:
            self.check_owner(installation)
        except WrongStore as error:
            if error.is_marked or not is_ours():
                raise
            self.put(INSTALLATION_MARK, iter([installation.encode()]))
            self.check_owner(installation)  # another installation may have marked it at the same time

    def put(self, key: str, pieces: Iterator[bytes], *, part_bytes: int | None = None) -> None:
        """Write a file; nothing of it arrives if `pieces` raises.

        Raises:
            StoreUnavailable: The store accepts no more.
        """
        path = self.path_of(key)
        self.check_root()
        if self.is_local:
            return self._put_durably(Path(path), pieces)
        with self.store_errors():
            options = {} if part_bytes is None else {"block_size": part_bytes}
            file = self.files.open(path, "wb", **options)
        try:
            for piece in pieces:
                with self.store_errors():
                    file.write(piece)
            with self.store_errors():
                file.close()
        except BaseException:
            _discard_partial(file)
            raise

    def _put_durably(self, path: Path, pieces: Iterator[bytes]) -> None:
        """Write into a local folder: a file appears under its name only when it is complete and on disk."""
        part = path.with_name(f".{path.name}.{uuid4().hex}{_PART}")
        with self.store_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            file = part.open("xb")
        try:
            with file:
                for piece in pieces:
                    with self.store_errors():
                        file.write(piece)
                with self.store_errors():
                    file.flush()
                    os.fsync(file.fileno())
            with self.store_errors():
                part.replace(path)
                for folder in path.parents:
                    _fsync_folder(folder)
                    if folder == Path(self._root):
                        break
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    def remove_partial(self, key: str) -> None:
        """Remove what a killed process left half written below a key of a local folder."""
        if self.is_local:
            with self.store_errors():
                for entry in files_below(Path(self.path_of(key))):
                    if entry.name.startswith(".") and entry.name.endswith(_PART):
                        Path(entry.path).unlink()

    def open(self, key: str) -> "StoredFile":
        """Open a file for reading.

        Raises:
            ObjectMissing, StoreUnavailable: See these.
        """
        path = self.path_of(key)
        self.check_root()
        with self.store_errors():
            try:
                return StoredFile(self, self.files.open(path, "rb", block_size=PIECE_BYTES), key)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                raise ObjectMissing(key.rpartition("/")[2]) from error

    def get(self, key: str, most: int) -> Iterator[bytes]:
        """Yield a file in pieces, ending with the first piece beyond `most` bytes: the rest need not be fetched."""
        with self.open(key) as file:
            taken = 0
            while taken <= most and (piece := file.read(PIECE_BYTES)):
                taken += len(piece)
                yield piece

    def read(self, key: str, most: int) -> bytes:
        """Return the content of a file; raise `OutsideStorage` if it has more than `most` bytes."""
        content = b"".join(self.get(key, most))
        if len(content) > most:
            raise OutsideStorage(f"larger than {most:,} bytes: {key!r}")
        return content

    def remove(self, key: str) -> None:
        """Remove a file, or all files below a key; no error if there is none.

        Raises:
            StoreUnavailable: Something may be left.
        """
        path = self.path_of(key)
        self.check_root()
        with self.store_errors(), suppress(FileNotFoundError):
            self.files.rm(path, recursive=True)

    def move(self, key: str, target: str) -> None:
        """Move all files below a key; they count as modified now."""
        source, goal = self.path_of(key), self.path_of(target)
        if not self.is_local:
            for file in self.list(key):
                moved = self.path_of(target + file.key.removeprefix(key))
                with self.store_errors():
                    self.files.cp_file(self.path_of(file.key), moved)
            self.remove(key)
            return
        self.check_root()
        with self.store_errors():
            Path(goal).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, goal)
            os.utime(goal)
            for entry in files_below(Path(goal)):
                os.utime(entry.path)

    def list(self, key: str) -> list[ObjectFacts]:
        """Return all files below a key."""
        path = self.path_of(key)
        self.check_root()
        with self.store_errors():
            try:
                listing = self.files.find(path, detail=True)
            except FileNotFoundError:
                return []
        prefix = path.lstrip("/")
        return [
            ObjectFacts(
                f"{key}/{name.lstrip('/').removeprefix(prefix).lstrip('/')}", int(about["size"]), _changed_at(about)
            )
            for name, about in listing.items()
        ]

    @contextmanager
    def store_errors(self) -> Iterator[None]:
        """Convert any exception into `StoreUnavailable`: the store cannot be used now. For calls of libraries only."""
        try:
            yield
        except (ObjectMissing, StoreUnavailable):
            raise
        except Exception as error:
            log.warning("%s: %s", self.url, f"{type(error).__name__}: {error}"[:_MAX_LOGGED])
            raise StoreUnavailable(*describe_store_error(error), _is_refusal(error)) from error

    def _protocol_names(self) -> tuple[str, ...]:
        protocol = self.files.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)


class StoredFile(io.RawIOBase):
    """Open file of a store, which raises `StoreUnavailable` and `ObjectMissing` only."""

    def __init__(self, store: ObjectStore, file: Any, key: str) -> None:
        super().__init__()
        self.size = int(file.size)
        self.key = key
        self._store, self._file = store, file

    def read(self, size: int = -1, /) -> bytes:
        with self._store.store_errors():
            try:
                content: bytes = self._file.read(size)
            except FileNotFoundError as error:
                raise ObjectMissing(self.key.rpartition("/")[2]) from error
            return content

    def readline(self, size: int | None = -1, /) -> bytes:
        with self._store.store_errors():
            line: bytes = self._file.readline()
            return line

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        with self._store.store_errors():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            with suppress(Exception):
                self._file.close()
        super().close()


def _changed_at(about: dict[str, Any]) -> float:
    """Return the time of the last change, which each file system names in its own way; now if it has none."""
    moment = about.get("LastModified") or about.get("mtime") or about.get("created") or time.time()
    return moment.timestamp() if isinstance(moment, datetime) else float(moment)


def _discard_partial(file: Any) -> None:
    """Discard a partly written file, so that nothing of it arrives in the store."""
    with suppress(Exception):  # the store removes the rest by itself
        if hasattr(file, "discard"):
            file.discard()
    from fsspec.spec import AbstractBufferedFile

    if isinstance(file, AbstractBufferedFile):
        file.closed = True  # closing it would complete the upload
    else:
        file.close()


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support it
            raise
    finally:
        os.close(descriptor)


def _is_refusal(error: Exception) -> bool:
    has_none = {kind.__name__ for kind in type(error).__mro__} & _NO_CREDENTIALS_TYPES
    return bool(has_none) or isinstance(error, PermissionError)


def describe_store_error(error: Exception) -> tuple[str, bool]:
    """Describe an error of the store in a clause, and return True with it if nothing answers there at all."""
    names = {kind.__name__ for kind in type(error).__mro__}
    number = error.errno if isinstance(error, OSError) else None
    if names & _NO_CREDENTIALS_TYPES:
        return "this process has no credentials for it", True
    if isinstance(error, PermissionError) or number == errno.EROFS:
        return "it refuses this process: check its credentials and its permissions there", False
    if isinstance(error, TimeoutError) or names & _SILENT_TYPES or number in _SILENT:
        return "it does not answer", True
    if isinstance(error, FileNotFoundError):
        return "the location does not exist", False
    if number in _FULL:
        return "it has no space left", False
    return f"it answers with an error ({type(error).__name__})", False
