"""A file on its way into a data set: read as what it is, checked row by row, kept as JSONL, hashed while written."""

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from app.config import Settings
from app.datasets.child import NoTurn
from app.datasets.readers.array import ArrayReader
from app.datasets.readers.kinds import HEAD_BYTES, Kind, Reader, kind_of
from app.datasets.readers.lines import LineReader
from app.datasets.readers.parquet import ParquetReader
from app.datasets.readers.table import TableReader
from app.datasets.rows import Rows, TooManyBadRows
from app.datasets.tokens import TokenCounter
from app.errors import ApiError, FieldError, invalid, too_large

_WRITE_BYTES = 256 * 1024
# Of its own: while these wait for a process that reads, everything else that needs a thread still finds one.
_THREADS = ThreadPoolExecutor(max_workers=32, thread_name_prefix="upload")

PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.1

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """As `asyncio.to_thread`, for what uploads do."""
    call = partial(copy_context().run, partial(work, *arguments, **named))
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


async def in_turn(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """The same for what may need a process, of which there are few: it waits for one, and holds no thread meanwhile.

    Raises `ApiError` when it has waited for a minute.
    """
    patient_until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await in_thread(work, *arguments, **named)
        except NoTurn:
            if time.monotonic() > patient_until:
                detail = "This server has too many other files to read at this moment; send yours again a little later."
                raise ApiError(503, "too_many_uploads", detail, headers={"Retry-After": "30"}) from None
        await asyncio.sleep(_PAUSE_SECONDS)


@dataclass(frozen=True)
class Received:
    """A whole, valid data set in `path`, already on the disk."""

    path: Path
    name: str
    format: str
    rows: int
    bytes: int
    sha256: str
    columns: list[str]
    preview: list[Any]
    token_statistics: dict[str, Any] | None = None
    digest: str = ""
    """What was asked for, as a hash: that of the file as it came, and of all that was said about it."""


@dataclass(frozen=True)
class Reading:
    """How the caller wants a file to be read; None: as it looks."""

    format: str | None = None
    file_format: Kind | None = None
    columns: Mapping[str, str] | None = None
    tokens: TokenCounter | None = None


class Receiving:
    """One or more files that become one data set, in a folder of their own.

    For each file `begin`, `feed` and `end`, then `more` until it is False; at last `finish`. Raises `ApiError` for
    all that is wrong. Blocks: to be called in a thread.
    """

    def __init__(self, folder: Path, settings: Settings, reading: Reading) -> None:
        self._folder = folder
        self._settings = settings
        self._reading = reading
        self._stored = _Stored(folder / "data", settings.max_upload_bytes)
        self._rows = Rows(reading.format, self._stored.write, reading.columns, reading.tokens)
        self._reader: Reader | None = None
        self._name = ""
        self._head = bytearray()
        self._came = 0
        self._sha256 = hashlib.sha256()

    @property
    def format(self) -> str | None:
        """The format of the rows, once it is known."""
        return self._rows.format

    @property
    def sha256_as_it_came(self) -> str:
        """Of the files before they were read."""
        return self._sha256.hexdigest()

    def expect(self, format: str) -> None:
        """The format, told behind the file."""
        self._rows.format = format

    def begin(self, name: str, place: str = "") -> None:
        """A file comes; `place` stands before what is wrong with it."""
        self._name, self._rows.file = name, place
        self._head.clear()
        self._drop_reader()

    def feed(self, data: bytes) -> None:
        """The next bytes of the file."""
        self._came += len(data)
        if self._came > self._settings.max_upload_bytes:
            raise too_large("A data set", self._settings.max_upload_bytes)
        self._sha256.update(data)
        try:
            if self._reader is not None:
                self._reader.feed(data)
                return
            self._head += data
            if len(self._head) >= HEAD_BYTES:
                self._choose().feed(bytes(self._head))
        except TooManyBadRows:
            raise self._refusal() from None

    def end(self) -> None:
        """The file has ended."""
        try:
            if self._reader is None:
                self._choose().feed(bytes(self._head))
            if self._reader is not None:
                self._reader.end()
        except TooManyBadRows:
            raise self._refusal() from None

    def more(self) -> bool:
        """Read on for a moment; False once the file is through."""
        try:
            return self._reader is not None and self._reader.more()
        except TooManyBadRows:
            raise self._refusal() from None

    def finish(self, name: str, digest: str = "") -> Received:
        """All files are through."""
        try:
            if self._rows.finish():
                raise self._refusal()
        except TooManyBadRows:
            raise self._refusal() from None
        self._stored.finish()
        tokens = self._reading.tokens
        return Received(
            path=self._stored.path,
            name=name,
            format=self._rows.format or "",
            rows=self._rows.count,
            bytes=self._stored.bytes,
            sha256=self._stored.sha256.hexdigest(),
            columns=list(self._rows.columns),
            preview=self._rows.preview,
            token_statistics=tokens.statistics(self._rows.count) if tokens else None,
            digest=digest,
        )

    def close(self) -> None:
        """Let go of files and processes; what was received stays in the folder."""
        self._drop_reader()
        self._stored.close()

    def _choose(self) -> Reader:
        kind = self._reading.file_format or kind_of(self._name, bytes(self._head))
        most = self._settings.max_line_bytes
        if kind is None:
            message = "neither name nor content tells what it is: name it .jsonl, .json, .csv or .parquet, or send "
            raise invalid([FieldError(field="file", code="unknown_file_format", message=message + "`file_format`")])
        if kind == "parquet":
            reader: Reader = ParquetReader(self._rows, most, self._folder / "spool", self._settings)
        elif kind == "csv":
            reader = TableReader(self._rows, most)
        elif kind == "json":
            reader = ArrayReader(self._rows, most)
        else:
            reader = LineReader(self._rows, most)
        self._reader = reader
        return reader

    def _drop_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _refusal(self) -> ApiError:
        errors = self._rows.errors
        whole = [error for error in errors if not error.field]
        if len(whole) == len(errors):
            return invalid([error.model_copy(update={"field": "file"}) for error in errors])
        errors = [error if error.field else error.model_copy(update={"field": "file"}) for error in errors]
        more = "; these are the first" if len(errors) > 1 else ""
        count = "1 row is" if len(errors) == 1 else f"{len(errors)} rows are"
        detail = (
            f"Nothing was kept: {count} not fit for training{more} ({errors[0].field}: "
            f"{errors[0].message}). Correct the file and upload it again."
        )
        return invalid(errors, detail, code="bad_rows")


class _Stored:
    """The file that is kept: written in blocks, counted and hashed."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self.bytes = 0
        self.sha256 = hashlib.sha256()
        self._most_bytes = most_bytes
        self._file = path.open("wb", buffering=0)
        self._block = bytearray()

    def write(self, line: bytes) -> None:
        self._block += line
        if len(self._block) >= _WRITE_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _flush(self) -> None:
        block = bytes(self._block)
        self._block.clear()
        self.bytes += len(block)
        if self.bytes > self._most_bytes:
            raise too_large("A data set, as the lines of JSON that are kept of it,", self._most_bytes)
        self.sha256.update(block)
        view = memoryview(block)
        while view:  # an unbuffered file may take less than it is given, when the disk fills up for one
            view = view[self._file.write(view) :]
