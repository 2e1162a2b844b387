"""Receiving a data set: multipart taken apart, checked, hashed and written as it comes, once and in pieces."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.config import Settings
from app.datasets.validation import FORMATS, RowValidator, TooManyBadRows
from app.errors import ApiError, FieldError, clean, invalid, too_large

_BATCH = 1024 * 1024
_MOST_FIELD_BYTES = 1024
_MOST_PARTS = 10


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


async def receive(content_type: str, chunks: AsyncIterable[bytes], folder: Path, settings: Settings) -> Received:
    """Read a multipart upload into `folder`; raises `ApiError` for all that is wrong with it.

    Holds a megabyte of the body and at most one row at a time. Parsing, checking and writing happen in a
    thread, so that other requests are answered meanwhile.
    """
    upload = _Upload(content_type, folder, settings)
    try:
        batch = bytearray()
        async for chunk in chunks:
            batch += chunk
            if len(batch) >= _BATCH:
                await asyncio.to_thread(upload.feed, bytes(batch))
                batch.clear()
        await asyncio.to_thread(upload.feed, bytes(batch))
        return await asyncio.to_thread(upload.finish)
    finally:
        upload.close()


class _Upload:
    """State of one upload: the part that is being read, the file that grows, the rows seen so far."""

    def __init__(self, content_type: str, folder: Path, settings: Settings) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise ApiError(
                415,
                "unsupported_media_type",
                "Send the data set as multipart/form-data with the part `file`: curl -F file=@data.jsonl",
            )
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _broken(str(error)) from None
        self._settings = settings
        self._validator = RowValidator(None, settings.max_line_bytes)
        self._path = folder / "data"
        self._file = self._path.open("wb", buffering=0)
        self._sha256 = hashlib.sha256()
        self._bytes = 0
        self._fields: dict[str, bytearray] = {}
        self._file_name: str | None = None
        self._parts = 0
        self._part = ""
        self._headers: dict[bytes, bytes] = {}
        self._header_name = b""
        self._header_value = b""
        self._ended = False

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(str(error)) from None
        except TooManyBadRows:
            raise self._refused() from None

    def finish(self) -> Received:
        if not self._ended:
            raise _broken("it ends before its last boundary")
        if self._file_name is None:
            raise _wrong("file", "missing", "there is no part `file`; curl -F file=@data.jsonl sends one")
        try:
            if self._validator.finish():
                raise self._refused()
        except TooManyBadRows:
            raise self._refused() from None
        self._check_format()
        os.fsync(self._file.fileno())
        return Received(
            path=self._path,
            name=self._name(),
            format=self._validator.format or "",
            rows=self._validator.rows,
            bytes=self._bytes,
            sha256=self._sha256.hexdigest(),
            columns=list(self._validator.columns),
            preview=self._validator.preview,
        )

    def close(self) -> None:
        self._file.close()

    def _refused(self) -> ApiError:
        errors = self._validator.errors
        if not errors[0].field:
            return invalid([FieldError(field="file", code=errors[0].code, message=errors[0].message)])
        more = "; these are the first" if len(errors) > 1 else ""
        count = "1 row is" if len(errors) == 1 else f"{len(errors)} rows are"
        detail = (
            f"Nothing was kept: {count} not fit for training{more} ({errors[0].field}: "
            f"{errors[0].message}). Correct the file and upload it again."
        )
        return invalid(errors, detail, code="bad_rows")

    def _on_part_begin(self) -> None:
        self._headers = {}
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise _broken(f"it has more than {_MOST_PARTS} parts")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._part = options.get(b"name", b"").decode(errors="replace")
        if self._part not in ("file", "name", "format"):
            raise _wrong(clean(self._part, 60), "unknown_field", "the parts are `file`, `name` and `format`")
        if self._part in self._fields or (self._part == "file" and self._file_name is not None):
            raise _wrong(self._part, "given_twice", f"there are two parts `{self._part}`; send one")
        if self._part == "file":
            self._file_name = options.get(b"filename", b"").decode(errors="replace")
        else:
            self._fields[self._part] = bytearray()

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._part != "file":
            field = self._fields[self._part]
            field += piece
            if len(field) > _MOST_FIELD_BYTES:
                raise _wrong(self._part, "too_long", f"may have {_MOST_FIELD_BYTES} bytes")
            return
        self._bytes += len(piece)
        if self._bytes > self._settings.max_upload_bytes:
            raise too_large("A data set", self._settings.max_upload_bytes)
        self._validator.feed(piece)
        self._sha256.update(piece)
        view = memoryview(piece)
        while view:  # an unbuffered file may take less than it is given, when the disk fills up for one
            view = view[self._file.write(view) :]

    def _on_part_end(self) -> None:
        if self._part == "format":
            self._check_format()
            self._validator.format = self._field("format")

    def _on_end(self) -> None:
        self._ended = True

    def _check_format(self) -> None:
        wanted, found = self._field("format"), self._validator.format
        if wanted is None:
            return
        if wanted not in FORMATS:
            raise _wrong("format", "unknown_format", f"must be one of {', '.join(FORMATS)}")
        if found is not None and found != wanted:
            raise _wrong("format", "format_mismatch", f"the rows are {found}, not {wanted}")

    def _name(self) -> str:
        given = self._field("name")
        name = given if given is not None else Path((self._file_name or "").replace("\\", "/")).name
        name = clean(name.strip(), 200)
        if given is not None and not name:
            raise _wrong("name", "empty", "must not be empty; leave it out to use the name of the file")
        return name or "data"

    def _field(self, name: str) -> str | None:
        raw = self._fields.get(name)
        if raw is None:
            return None
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise _wrong(name, "not_utf8", "must be UTF-8") from None


def _wrong(field: str, code: str, message: str) -> ApiError:
    return invalid([FieldError(field=field, code=code, message=message)])


def _broken(why: str) -> ApiError:
    return _wrong("", "broken_multipart", f"the multipart body cannot be read ({clean(why, 200)})")
