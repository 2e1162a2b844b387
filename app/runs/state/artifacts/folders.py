"""Folders of files that are listed, archived and downloaded: on this machine or in an object store."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from starlette.responses import FileResponse

from app.api.errors import ApiError, conflict, to_printable
from app.api.file_response import COMPARED_FIRST_BYTES, OpenFileResponse, StoredFileResponse
from app.infra.files import file_manifest
from app.infra.files.object_store import ObjectMissing, ObjectStore
from app.infra.files.untrusted_folder import OutsideStorage, entries_below, open_below
from app.infra.files.verified_reads import CorruptContent
from app.infra.storage import Storage
from app.infra.terminal_text import is_plain_path

MAX_FILES = 2000
"""Files and folders that are listed or archived; an archive that is sent takes a kilobyte of memory for each."""
_PIECE = 256 * 1024
"""Bytes read at once: a download that its client does not read holds two pieces."""


@dataclass(frozen=True, order=True)
class FileFacts:
    """File of a folder."""

    path: str
    """Path below the folder."""
    bytes: int
    modified: int
    """Seconds since 1970."""


class FileFolder(Protocol):
    """Folder that a training process has written, so that its content is untrusted. All methods block.

    A path that is not plain text is neither listed nor sent: it would control the terminals in which the file is
    listed, and archives and other systems would read it as another one.
    """

    def list_files(self) -> tuple[list[FileFacts], int]:
        """Return the files, sorted by path, and the number of those left out.

        Raises:
            ApiError: 404 if the folder is missing, 409 if it has more than `MAX_FILES` files and folders.
        """

    def read_chunks(self, path: str, size: int) -> Iterator[bytes]:
        """Yield the content of a file that was listed with `size` bytes.

        Raises:
            OSError, StoreUnavailable: It cannot be read, or is not what was stored (`CorruptContent`). That is known
                after all but its last piece.
        """

    def compare_small(self, files: Sequence[tuple[str, int]]) -> None:
        """Compare files of an object store with what was stored, if they are small together.

        Raises:
            ApiError: 409 if one differs.
        """

    def file_response(self, path: str) -> FileResponse:
        """Return a response that sends one file, whole or the requested ranges; raise 404 if there is none."""


class LocalFolder:
    """Folder on this machine; links are not followed."""

    def __init__(self, folder: Path, is_wanted: Callable[[str], bool] = lambda _: True) -> None:
        self._folder = folder
        self._is_wanted = is_wanted

    def list_files(self) -> tuple[list[FileFacts], int]:
        if self._folder.is_symlink() or not self._folder.is_dir():
            raise _missing_error()
        files: list[FileFacts] = []
        seen = left_out = 0
        for path, status in entries_below(self._folder):
            if not self._is_wanted(path):
                continue
            seen += 1
            if seen > MAX_FILES:
                raise _too_many()
            if status is not None and is_plain_path(path):
                files.append(FileFacts(path, status.st_size, int(status.st_mtime)))
            elif status is not None:
                left_out += 1
        return sorted(files), left_out

    def read_chunks(self, path: str, size: int) -> Iterator[bytes]:
        try:
            descriptor = open_below(self._folder, path)
        except OutsideStorage as error:
            raise OSError(str(error)) from None
        with os.fdopen(descriptor, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def compare_small(self, files: Sequence[tuple[str, int]]) -> None:
        pass  # the digests of files on this machine are not known

    def file_response(self, path: str) -> FileResponse:
        if not self._is_wanted(path) or not is_plain_path(path):
            raise _no_such_artifact(path)
        try:
            descriptor = open_below(self._folder, path)
        except (OutsideStorage, OSError):
            # The response must not reveal whether a path outside the folder exists.
            raise _no_such_artifact(path) from None
        return OpenFileResponse(os.fdopen(descriptor, "rb"), filename=path.rpartition("/")[2])


class StoredFolder:
    """Folder in an object store: the files that its manifest names."""

    def __init__(
        self,
        storage: Storage,
        objects: ObjectStore,
        key: str,
        manifest_key: str,
        sha256: str | None,
        modified: float,
    ) -> None:
        """`sha256` is that of the manifest; None if nothing was stored. All files count as modified at `modified`."""
        self._storage = storage
        self._objects = objects
        self._key = key
        self._manifest_key = manifest_key
        self._sha256 = sha256
        self._modified = modified
        self._digests: dict[str, str | None] = {}
        """SHA-256 of each file that was listed."""

    def list_files(self) -> tuple[list[FileFacts], int]:
        text = self._read_manifest()
        listed = self._parse_manifest(text)
        if len(listed) > MAX_FILES:
            raise _too_many()
        left_out = json.loads(text).get("left_out", 0)
        self._digests = {path: sha256 for path, (_, sha256) in listed.items()}
        files = [
            FileFacts(path, size, int(self._modified)) for path, (size, _) in listed.items() if is_plain_path(path)
        ]
        hidden = left_out if isinstance(left_out, int) else 0
        return sorted(files), len(listed) - len(files) + hidden

    def read_chunks(self, path: str, size: int) -> Iterator[bytes]:
        try:
            with self._objects.open(f"{self._key}/{path}") as file:
                if file.size != size:
                    raise CorruptContent(f"{path} has {file.size:,} bytes in the storage, not {size:,}")
                digest, taken = hashlib.sha256(), 0
                while piece := file.read(_PIECE):
                    digest.update(piece)
                    taken += len(piece)
                    if taken == size and digest.hexdigest() != self._digests.get(path):
                        raise CorruptContent(f"{path} has other contents in the storage than were stored")
                    yield piece
                if taken != size:
                    raise CorruptContent(f"{path} has {taken:,} bytes in the storage, not {size:,}")
        except ObjectMissing as error:
            raise CorruptContent(f"{path} is missing") from error

    def compare_small(self, files: Sequence[tuple[str, int]]) -> None:
        if sum(size for _, size in files) > COMPARED_FIRST_BYTES:
            return
        try:
            for path, size in files:
                for _ in self.read_chunks(path, size):
                    pass
        except CorruptContent:
            raise _corrupt_error() from None

    def file_response(self, path: str) -> FileResponse:
        size, sha256 = self._parse_manifest(self._read_manifest()).get(path, (None, None))
        if not is_plain_path(path) or size is None or sha256 is None:
            raise _no_such_artifact(path)
        try:
            file = self._objects.open(f"{self._key}/{path}")
        except (ObjectMissing, OutsideStorage):
            raise _no_such_artifact(path) from None
        if file.size != size:
            file.close()
            raise _corrupt_error()
        name = path.rpartition("/")[2]
        return StoredFileResponse(file, self._storage, sha256, _corrupt_error(), filename=name, modified=self._modified)

    def _parse_manifest(self, text: bytes) -> dict[str, tuple[int, str | None]]:
        try:
            listed: dict[str, tuple[int, str | None]] = {**file_manifest.parse_manifest(text)}
        except ValueError:
            raise _corrupt_error() from None
        if self._manifest_key == f"{self._key}/{file_manifest.MANIFEST}":
            listed[file_manifest.MANIFEST] = (len(text), self._sha256)
        return listed

    def _read_manifest(self) -> bytes:
        try:
            text = self._objects.read(self._manifest_key, file_manifest.MAX_BYTES)
        except ObjectMissing:
            raise _missing_error() from None
        except OutsideStorage:
            raise _corrupt_error() from None
        if hashlib.sha256(text).hexdigest() != self._sha256:
            raise _corrupt_error()
        return text


def _missing_error() -> ApiError:
    return ApiError(
        404,
        "artifacts_missing",
        "The files are not in the storage: they were removed, or the API and the workers have different values of "
        "ANNEAL_STORAGE.",
    )


def _corrupt_error() -> ApiError:
    return conflict(
        "artifacts_corrupt",
        "The files in the storage are not those that were stored; restore the storage, or resume the run to create "
        "them again.",
    )


def _too_many() -> ApiError:
    return conflict(
        "too_many_artifacts",
        f"There are more than {MAX_FILES:,} files and folders, too many to list: download them one by one by "
        "their paths, or copy them from the storage.",
    )


def _no_such_artifact(path: str) -> ApiError:
    return ApiError(
        404,
        "artifact_not_found",
        f"There is no artifact {to_printable(path, 100)}; list this run's artifacts to see their paths.",
    )
