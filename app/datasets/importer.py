"""Import of files into a dataset: detects the file type, validates row by row, stores JSONL and hashes it."""

import asyncio
import hashlib
import os
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from anneal.contracts.errors import FieldError
from app.api.errors import ApiError, invalid, too_large
from app.config import Settings
from app.datasets.readers.csv_table import TableReader
from app.datasets.readers.file_type import HEAD_BYTES, FileType, Reader, kind_of
from app.datasets.readers.gzip_stream import GzipStream
from app.datasets.readers.json_array import ArrayReader
from app.datasets.readers.jsonl import LineReader
from app.datasets.readers.parquet import ParquetReader
from app.datasets.row_writer import MOST_BAD_ROWS, RowWriter, TooManyBadRows
from app.datasets.token_counter import TokenCounter
from app.infra.files.disk_space import DiskReserve
from app.infra.process.sandbox import SandboxBusy

_WRITE_BYTES = 256 * 1024
# A separate pool: imports that wait for a reader process must not block other users of the default pool.
_THREAD_POOL = ThreadPoolExecutor(max_workers=32, thread_name_prefix="upload")

SLOT_TIMEOUT_SECONDS = 60.0
_RETRY_SECONDS = 0.1

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run `work` in the thread pool of uploads, like `asyncio.to_thread`."""
    call = partial(copy_context().run, partial(work, *arguments, **named))
    return await asyncio.get_running_loop().run_in_executor(_THREAD_POOL, call)


async def run_with_slot(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run `work` in the thread pool of uploads and retry while no reader process is available.

    No thread is blocked during the wait. Raises a 503 `ApiError` after one minute.
    """
    deadline = time.monotonic() + SLOT_TIMEOUT_SECONDS
    while True:
        try:
            return await in_thread(work, *arguments, **named)
        except SandboxBusy:
            if time.monotonic() > deadline:
                detail = "This server is already reading too many files; send yours again a little later."
                raise ApiError(503, "too_many_uploads", detail, headers={"Retry-After": "30"}) from None
        await asyncio.sleep(_RETRY_SECONDS)


@dataclass(frozen=True)
class ImportedFile:
    """Complete, valid dataset in `path`, already flushed to disk."""

    path: Path
    name: str
    format: str
    rows: int
    bytes: int
    sha256: str
    columns: list[str]
    preview: list[Any]
    source: dict[str, Any]
    """Recognized source, as `anneal.contracts.schemas.datasets.DatasetSource`."""
    token_statistics: dict[str, Any] | None = None
    digest: str = ""
    """Digest of the request: of the original file and of all fields."""
    original: Path | None = None
    """The original file, if it is to be kept and differs from the one in `path`."""


@dataclass(frozen=True)
class ImportOptions:
    """Import options of a file; None means detect."""

    format: str | None = None
    file_format: FileType | None = None
    columns: Mapping[str, str] | None = None
    tokens: TokenCounter | None = None
    keeps_original: bool = False
    """Keep the original file, unless it is the same as the one with the rows."""


class DatasetImporter:
    """Importer of one or more files into one dataset, in a separate folder.

    For each file call `begin_file`, `feed` and `end_file`, then `read_more` until it returns False; finally call
    `finish_dataset`. Raises `ApiError` for invalid input. All methods block, so call them in a thread.
    """

    def __init__(self, folder: Path, settings: Settings, reading: ImportOptions) -> None:
        self._folder = folder
        self._settings = settings
        self._reading = reading
        self._disk_reserve = DiskReserve(folder, settings.disk_reserve_bytes)
        most_bytes = settings.max_upload_bytes
        self._stored = StoredFile(folder / "data", most_bytes, self._disk_reserve)
        is_kept = reading.keeps_original
        self._original = StoredFile(folder / "original", most_bytes, self._disk_reserve) if is_kept else None
        self._rows = RowWriter(reading.format, self._stored.write, reading.columns, reading.tokens)
        self._requested_format = reading.format
        self._reader: Reader | None = None
        self._name = ""
        self._head = bytearray()
        self._kind: FileType | None = None
        self._delimiter: str | None = None
        self._gzip = GzipStream(self._rows)
        self._bytes_received = 0
        self._bytes_read = 0
        self._sha256 = hashlib.sha256()

    @property
    def format(self) -> str | None:
        """Format of the rows, once it is known."""
        return self._rows.format

    @property
    def sha256_as_it_came(self) -> str:
        """SHA-256 of the original files."""
        return self._sha256.hexdigest()

    def set_format(self, format: str) -> None:
        """Set the format when its field follows the file."""
        self._rows.format = self._requested_format = format

    def begin_file(self, name: str, place: str = "") -> None:
        """Start a file; `place` is the prefix of its error locations."""
        self._name, self._rows.file = name, place
        self._head.clear()
        self._gzip = GzipStream(self._rows)
        self._drop_reader()

    def feed(self, data: bytes) -> None:
        """Process the next bytes of the file."""
        self._bytes_received += len(data)
        if self._bytes_received > self._settings.max_upload_bytes:
            raise too_large("A dataset", self._settings.max_upload_bytes)
        self._sha256.update(data)
        if self._original is not None:
            self._original.write(data)
        try:
            for piece in self._gzip.decompress_pieces(data):
                self._read_decompressed(piece)
        except TooManyBadRows:
            raise self._bad_rows_error() from None

    def end_file(self) -> None:
        """Handle the end of the file."""
        try:
            for piece in self._gzip.end_file():
                self._read_decompressed(piece)
            if self._reader is None:
                self._read_head()
            if self._reader is not None:
                self._reader.end_file()
            if isinstance(self._reader, TableReader):
                self._delimiter = self._reader.delimiter
        except TooManyBadRows:
            raise self._bad_rows_error() from None

    def read_more(self) -> bool:
        """Continue reading for a short time; return False once the file is completely read."""
        try:
            return self._reader is not None and self._reader.read_more()
        except TooManyBadRows:
            raise self._bad_rows_error() from None

    def finish_dataset(self, name: str, digest: str = "") -> ImportedFile:
        """Complete the dataset after the last file and return it."""
        try:
            if self._rows.finish_rows():
                raise self._bad_rows_error()
        except TooManyBadRows:
            raise self._bad_rows_error() from None
        self._stored.flush_to_disk()
        original = self._original if self._stored.sha256.digest() != self._sha256.digest() else None
        if original is not None:
            original.flush_to_disk()
        tokens = self._reading.tokens
        return ImportedFile(
            path=self._stored.path,
            name=name,
            format=self._rows.format or "",
            rows=self._rows.count,
            bytes=self._stored.bytes,
            sha256=self._stored.sha256.hexdigest(),
            columns=list(self._rows.columns),
            preview=self._rows.preview,
            source={
                "file_format": self._kind,
                "delimiter": self._delimiter,
                "gzip": self._gzip.is_gzip,
                "layout": self._rows.layout,
                "sha256": self.sha256_as_it_came,
                "requested_format": self._requested_format,
                "requested_columns": None if self._reading.columns is None else dict(self._reading.columns),
                **({} if original is None else {"original_bytes": original.bytes}),
            },
            token_statistics=tokens.compute_statistics(self._rows.count) if tokens else None,
            digest=digest,
            original=None if original is None else original.path,
        )

    def close(self) -> None:
        """Release files and processes; received data stays in the folder."""
        self._drop_reader()
        self._stored.close()
        if self._original is not None:
            self._original.close()

    def _read_decompressed(self, data: bytes) -> None:
        self._bytes_read += len(data)
        if self._bytes_read > self._settings.max_upload_bytes:
            raise too_large("A dataset, decompressed,", self._settings.max_upload_bytes)
        if self._reader is not None:
            self._reader.feed(data)
            return
        self._head += data
        if len(self._head) >= HEAD_BYTES:
            self._read_head()

    def _read_head(self) -> None:
        # Spreadsheets and some editors write a byte order mark into UTF-8 files.
        head = bytes(self._head).removeprefix(BOM_UTF8)
        self._create_reader(head).feed(head)

    def _create_reader(self, head: bytes) -> Reader:
        kind = self._reading.file_format or kind_of(self._name, head)
        most = self._settings.max_line_bytes
        if kind is None:
            message = "the file type cannot be detected: name the file .jsonl, .json, .csv, .tsv or .parquet, or send "
            raise invalid([FieldError(field="file", code="unknown_file_format", message=message + "`file_format`")])
        if kind == "parquet":
            reader: Reader = ParquetReader(self._rows, most, self._folder / "spool", self._settings, self._disk_reserve)
        elif kind in ("csv", "tsv"):
            reader = TableReader(self._rows, most, "\t" if kind == "tsv" else None)
        elif kind == "json":
            reader = ArrayReader(self._rows, most)
        else:
            reader = LineReader(self._rows, most)
        self._kind, self._reader = kind, reader
        return reader

    def _drop_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _bad_rows_error(self) -> ApiError:
        errors = self._rows.errors
        whole = [error for error in errors if not error.field]
        if len(whole) == len(errors):
            return invalid([error.model_copy(update={"field": "file"}) for error in errors])
        errors = [error if error.field else error.model_copy(update={"field": "file"}) for error in errors]
        if len(errors) == 1:
            summary = f"1 row is not valid for training ({errors[0].field}: {errors[0].message})"
        elif len(errors) < MOST_BAD_ROWS:
            summary = f"{len(errors)} rows are not valid for training"
        else:  # reading stops there
            summary = f"at least {len(errors)} rows are not valid for training; these are the first"
        return invalid(errors, f"Nothing was stored: {summary}. Correct the file and upload it again.", code="bad_rows")


class StoredFile:
    """Stored file: written in blocks, counted and hashed."""

    def __init__(self, path: Path, most_bytes: int, disk_reserve: DiskReserve) -> None:
        """Create the file, which may have at most `most_bytes`.

        Raises:
            DiskReserveReached: The disk has no room for it, also from `write` and `flush_to_disk`.
        """
        disk_reserve.ensure_room(0)
        self.path = path
        self.bytes = 0
        self.sha256 = hashlib.sha256()
        self._most_bytes = most_bytes
        self._disk_reserve = disk_reserve
        self._file = path.open("wb", buffering=0)
        self._block = bytearray()

    def write(self, line: bytes) -> None:
        """Append a line; raises a 413 error if the file becomes too large."""
        self._block += line
        if len(self._block) >= _WRITE_BYTES:
            self._write_block()

    def flush_to_disk(self) -> None:
        """Write what is buffered and flush the file to disk."""
        self._write_block()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; it stays in its folder."""
        self._file.close()

    def _write_block(self) -> None:
        block = bytes(self._block)
        self._block.clear()
        self.bytes += len(block)
        if self.bytes > self._most_bytes:
            raise too_large("A dataset, converted to JSONL,", self._most_bytes)
        self._disk_reserve.ensure_room(len(block))
        self.sha256.update(block)
        view = memoryview(block)
        while view:  # an unbuffered file may write less than requested, for example when the disk fills up
            view = view[self._file.write(view) :]
