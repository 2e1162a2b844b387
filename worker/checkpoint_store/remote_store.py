"""Whole folders in the object store, on any file system that fsspec supports.

A folder is sent with its manifest last, and fetched exactly as it was written. The manifest of a checkpoint is a file
in its folder, which the trainer has written. That of an output or of an attempt's records is beside the folder, and is
written while they are sent.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from app.infra.files import file_manifest
from app.infra.files.object_store import PIECE_BYTES, ObjectMissing, ObjectStore
from app.infra.files.tree import remove_tree
from app.infra.files.untrusted_folder import create_below, entries_below, open_below
from app.infra.storage import Storage
from app.infra.terminal_text import is_plain_path
from worker.checkpoint_files import manifest


class TransferCancelled(Exception):
    """The sender or fetcher was asked to end."""


class MissingInStore(Exception):
    """The store has no such file."""


class CorruptInStore(Exception):
    """The object store has other bytes than were written."""


class LocalCheckpointMissing(Exception):
    """The checkpoint to send no longer exists here."""


class LocalCheckpointCorrupt(Exception):
    """The checkpoint to send differs from what was written, so that it would be useless in the store."""


class RemoteStore:
    """Object store; its paths are those below the storage root, made from ids by `Storage` alone."""

    def __init__(self, url: str, storage: Storage, setting: str = "ANNEAL_STORAGE") -> None:
        """Set up the client; nothing is connected yet.

        Raises:
            SetupError: No installed library supports the URL.
        """
        self.url = url
        self.objects = ObjectStore(url, setting)
        self._storage = storage

    def send_checkpoint(self, folder: Path, sha256: str, on_piece: Callable[[], None]) -> None:
        """Send a checkpoint, its manifest last: before that, no reader takes the files for a checkpoint.

        Each byte is hashed on its way, and none is read through a link, because the folder belongs to its trainer.
        `on_piece` is called often; an exception that it raises ends the transfer, and nothing of the current file
        arrives.

        Raises:
            LocalCheckpointMissing: The folder does not exist here.
            LocalCheckpointCorrupt: The checkpoint is corrupt.
            OSError: It cannot be read here and now, which says nothing about its state.
            StoreUnavailable: The store accepts no more.
        """
        text = b"".join(_local_pieces(folder, file_manifest.MANIFEST))
        if hashlib.sha256(text).hexdigest() != sha256:
            raise LocalCheckpointCorrupt(
                f"{folder.name}: {file_manifest.MANIFEST} is not the one that was written with it"
            )
        target = self._storage.key_of(folder)
        self.objects.check_root()
        with _local_errors(folder):
            listed = file_manifest.parse_manifest(text)
        self.objects.remove_partial(target)
        for name, expected in listed.items():
            self.objects.put(f"{target}/{name}", _verified_chunks(folder, name, expected, on_piece))
        self.objects.put(f"{target}/{file_manifest.MANIFEST}", iter([text]))

    def send_described(
        self,
        folder: Path,
        described: Path,
        is_wanted: Callable[[str], bool],
        sent: dict[str, tuple[int, str]],
        on_piece: Callable[[], None],
    ) -> str:
        """Send the files of a folder that are wanted, then their manifest as `described`; return its SHA-256.

        Links and paths that are not plain text are left out; the manifest has the number of these paths. `sent` has the
        size and SHA-256 of files that an earlier try has sent, and is extended.

        Raises:
            OutsideStorage, OSError: The folder cannot be read.
            ValueError: It has too many files to describe.
            StoreUnavailable: The store accepts no more.
        """
        target, left_out = self._storage.key_of(folder), 0
        names = []
        for name, status in entries_below(folder):
            if status is not None and is_wanted(name):
                names.append(name)
                left_out += not is_plain_path(name)
        for name in sorted(filter(is_plain_path, names)):
            if name not in sent:
                digest = _Digest()
                self.objects.put(f"{target}/{name}", digest.pass_through(_opened_pieces(folder, name), on_piece))
                sent[name] = (digest.bytes, digest.sha256)
        files = {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in sorted(sent.items())}
        text = json.dumps({"format": 1, "files": files, "left_out": left_out}, indent=1).encode()
        if len(text) > file_manifest.MAX_BYTES:
            raise ValueError(f"{folder.name} has too many files: {len(files):,}")
        self.objects.put(self._storage.key_of(described), iter([text]))
        return hashlib.sha256(text).hexdigest()

    def fetch_checkpoint(self, folder: Path, sha256: str, own_name: str, on_piece: Callable[[], None]) -> None:
        """Restore `folder` as it was written: staged, verified to the last byte, then renamed.

        The parent of `folder` belongs to the user that trains, who could put a link in the place of anything there, so
        the checkpoint is staged in a folder that only this worker may write. `own_name` identifies the fetch, so that
        no other one uses the same staging folder.

        Raises:
            MissingInStore, CorruptInStore, StoreUnavailable: See these; nothing that was fetched is left here.
            OSError: This worker's own storage cannot take it.
        """
        source = self._storage.key_of(folder)
        text = self._fetch_manifest(f"{source}/{file_manifest.MANIFEST}", sha256)
        own = self._storage.fetch_dir(folder, own_name)

        def is_whole(staging: Path) -> list[str]:
            with _create_file(staging, file_manifest.MANIFEST) as file:
                file.write(text)
            return manifest.verify(staging, sha256, on_piece)

        self._restore_folder(source, folder, own, _parse_manifest(text), is_whole, on_piece)

    def fetch_described(
        self, folder: Path, described: Path, sha256: str, own_name: str, on_piece: Callable[[], None]
    ) -> None:
        """Restore a folder of `send_described`, as `fetch_checkpoint` does and with the same errors."""
        files = self.described_files(described, sha256)
        own = self._storage.fetch_dir(folder, own_name)

        def is_whole(staging: Path) -> list[str]:
            return manifest.find_differences(staging, files, on_piece)

        self._restore_folder(self._storage.key_of(folder), folder, own, files, is_whole, on_piece)

    def described_files(self, described: Path, sha256: str) -> dict[str, tuple[int, str]]:
        """Return size and SHA-256 of each file of a folder of `send_described`.

        Raises:
            MissingInStore, CorruptInStore, StoreUnavailable: See these.
        """
        return _parse_manifest(self._fetch_manifest(self._storage.key_of(described), sha256))

    def fetch_file(self, path: Path, size: int, sha256: str, staging: Path, on_piece: Callable[[], None]) -> None:
        """Restore a single file: staged in a folder of this worker's own, verified, then renamed.

        Raises:
            MissingInStore, CorruptInStore, StoreUnavailable: See these.
            OSError: This worker's own storage cannot take it.
        """
        remove_tree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            digest = _Digest()
            with _create_file(staging, path.name) as file, _naming_missing(path.name):
                for piece in digest.pass_through(self.objects.get(self._storage.key_of(path), size), on_piece):
                    file.write(piece)
            if (digest.bytes, digest.sha256) != (size, sha256):
                raise CorruptInStore(f"{path.name} in the store has other contents than were written")
            manifest.commit(staging, path.parent, on_piece, aside=staging.with_name(f"{staging.name}.replaced"))
        finally:
            remove_tree(staging, ignore_errors=True)

    def remove_folder(self, folder: Path) -> None:
        """Remove a checkpoint, or everything of a run, from the store; no error if there is none.

        Raises:
            StoreUnavailable: Something may be left.
        """
        self.objects.remove(self._storage.key_of(folder))

    def _fetch_manifest(self, key: str, sha256: str) -> bytes:
        with _naming_missing(key.rpartition("/")[2]):
            text = b"".join(self.objects.get(key, file_manifest.MAX_BYTES))
        if hashlib.sha256(text).hexdigest() != sha256:
            name = key.rpartition("/")[2]
            raise CorruptInStore(f"{name} in the storage is not the one that was written with it")
        return text

    def _restore_folder(
        self,
        source: str,
        folder: Path,
        own: Path,
        files: Mapping[str, tuple[int, str]],
        differences: Callable[[Path], list[str]],
        on_piece: Callable[[], None],
    ) -> None:
        staging = own / folder.name
        remove_tree(own, ignore_errors=True)
        own.mkdir(parents=True, mode=0o700)
        try:
            staging.mkdir()
            for name, (size, _) in files.items():
                with _create_file(staging, name) as file, _naming_missing(name):
                    for piece in self.objects.get(f"{source}/{name}", size):
                        file.write(piece)
                        on_piece()
            problems = differences(staging)
            if problems:
                raise CorruptInStore(f"it is corrupt in the storage: {'; '.join(problems[:3])}")
            folder.parent.mkdir(exist_ok=True)
            manifest.commit(staging, folder, on_piece, aside=own / "replaced")
        except MissingInStore as error:
            raise CorruptInStore(f"it is corrupt in the storage: {error} is missing") from error
        except ValueError as error:
            raise CorruptInStore(f"it is corrupt in the storage: {error}") from error
        finally:
            remove_tree(own, ignore_errors=True)


class _Digest:
    """Size and SHA-256 of what passes through."""

    def __init__(self) -> None:
        self.bytes = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def pass_through(self, pieces: Iterator[bytes], on_piece: Callable[[], None]) -> Iterator[bytes]:
        for piece in pieces:
            self._hash.update(piece)
            self.bytes += len(piece)
            on_piece()
            yield piece


def _parse_manifest(text: bytes) -> dict[str, tuple[int, str]]:
    try:
        return file_manifest.parse_manifest(text)
    except ValueError as error:  # `OutsideStorage` is one
        raise CorruptInStore(f"it is corrupt in the storage: {error}") from error


@contextmanager
def _naming_missing(name: str) -> Iterator[None]:
    try:
        yield
    except ObjectMissing as error:
        raise MissingInStore(name) from error


def _create_file(folder: Path, name: str) -> BinaryIO:
    """Create a fetched file; raise ValueError if the manifest, which a trainer wrote, names it a second time."""
    try:
        return os.fdopen(create_below(folder, name), "wb")
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{file_manifest.MANIFEST} names {name!r} twice") from error


def _verified_chunks(
    folder: Path, name: str, expected: tuple[int, str], on_piece: Callable[[], None]
) -> Iterator[bytes]:
    digest = _Digest()
    yield from digest.pass_through(_local_pieces(folder, name), on_piece)
    if (digest.bytes, digest.sha256) != expected:
        raise LocalCheckpointCorrupt(f"{folder.name}: {name} has other contents than were written")


def _local_pieces(folder: Path, name: str) -> Iterator[bytes]:
    with _local_errors(folder):
        file = os.fdopen(open_below(folder, name), "rb")
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _opened_pieces(folder: Path, name: str) -> Iterator[bytes]:
    with os.fdopen(open_below(folder, name), "rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


@contextmanager
def _local_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # `OutsideStorage` is a ValueError
        if not folder.exists():
            raise LocalCheckpointMissing(folder.name) from error
        raise LocalCheckpointCorrupt(f"{folder.name}: {error}") from error
