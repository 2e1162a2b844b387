"""Streaming parser of multipart uploads: reads the fields and passes the file on in chunks."""

import hashlib
import json
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from anneal.contracts.errors import FieldError
from app.api.errors import ApiError, invalid, to_printable
from app.config import Settings
from app.datasets.formats import FORMATS
from app.datasets.importer import DatasetImporter, ImportedFile, ImportOptions, in_thread, run_with_slot
from app.datasets.readers.file_type import KINDS, FileType
from app.datasets.row_writer import MOST_KEY_CHARACTERS
from app.datasets.token_counter import TokenCounter
from app.infra.strict_json import BadJson, parse_json

_BATCH = 1024 * 1024
_MAX_FIELD_BYTES = {"columns": 16 * 1024}
_DEFAULT_FIELD_BYTES = 1024
_MAX_CONTENT_TYPE_BYTES = 1024
_MAX_PARTS = 10
_MAX_HEADER_FIELDS = 8
"""Header fields of a part; clients send up to four."""
_BEFORE_THE_FILE = ("file_format", "columns", "tokenizer")
"""Fields that must precede the file, because the file is parsed while it is received."""
_MAX_SKIPPED_BYTES = 8 * 1024 * 1024
"""Bytes of an invalid file that are skipped to find a field behind it; a longer file is refused at once."""

LoadTokenizer = Callable[[str], Awaitable[TokenCounter]]
"""Function that loads a tokenizer by model name; raises `ApiError` if there is none."""


@dataclass(frozen=True)
class UploadForm:
    """Parts of an upload beside the part `file`."""

    fields: tuple[str, ...] = ("name", "format", "file_format", "columns", "tokenizer")
    required: Mapping[str, str] = field(default_factory=dict)
    """Fields that must be there, with their only value."""
    keeps_original: bool = False


async def receive_upload(
    content_type: str,
    chunks: AsyncIterable[bytes],
    folder: Path,
    settings: Settings,
    load_tokenizer: LoadTokenizer | None,
    form: UploadForm = UploadForm(),
) -> ImportedFile:
    """Read a multipart upload into `folder`; raises `ApiError` if it is invalid.

    Buffers one megabyte of the body and at most one row. Parsing, validation and writing happen in a thread, so
    that the event loop stays free for other requests. A form without the field `tokenizer` needs no `load_tokenizer`.
    """
    upload = _Upload(content_type, folder, settings, form)

    async def feed_batch(batch: bytes) -> None:
        tokenizer_name = await in_thread(upload.feed, batch)
        if tokenizer_name is not None and load_tokenizer is not None:
            # Awaited here and not in the thread, because it uses threads of the same pool itself.
            upload.tokens = await load_tokenizer(tokenizer_name)
            await in_thread(upload.go_on)

    try:
        batch = bytearray()
        async for chunk in chunks:
            batch += chunk
            if len(batch) >= _BATCH:
                await feed_batch(bytes(batch))
                batch.clear()
        await feed_batch(bytes(batch))
        await in_thread(upload.end_body)
        while await run_with_slot(upload.read_more):
            pass
        return await in_thread(upload.finish_file)
    finally:
        upload.close()


class _Upload:
    """State of one upload: the current part, the fields so far, and the file so far."""

    def __init__(self, content_type: str, folder: Path, settings: Settings, form: UploadForm) -> None:
        if len(content_type) > _MAX_CONTENT_TYPE_BYTES:  # its parser takes 50 ms for a long one
            raise _broken_body(f"its Content-Type has more than {_MAX_CONTENT_TYPE_BYTES:,} bytes")
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise ApiError(
                415,
                "unsupported_media_type",
                "Send the dataset as multipart/form-data with the part `file` (curl -F file=@data.jsonl), or name a "
                "dataset of the Hugging Face Hub in JSON.",
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
                max_header_count=_MAX_HEADER_FIELDS,
            )
        except FormParserError as error:
            raise _broken_body(str(error)) from None
        self._folder = folder
        self._settings = settings
        self._form = form
        self._receiving: DatasetImporter | None = None
        self.tokens: TokenCounter | None = None
        self._wanted_tokenizer: str | None = None
        self._deferred: list[Callable[[], None]] = []
        self._refusal: ApiError | None = None
        """Error of the file, until the parts behind it are known."""
        self._skipped_bytes = 0
        self._fields: dict[str, bytearray] = {}
        self._file_name: str | None = None
        self._parts = 0
        self._part = ""
        self._headers: dict[bytes, bytes] = {}
        self._header_name = b""
        self._header_value = b""
        self._ended = False

    def feed(self, data: bytes) -> str | None:
        """Parse the next bytes; return the name of a tokenizer that must be set before `go_on`, or None."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken_body(str(error)) from None
        return self._wanted_tokenizer

    def go_on(self) -> None:
        """Run the steps that waited for the tokenizer."""
        self._wanted_tokenizer = None
        deferred, self._deferred = self._deferred, []
        for step in deferred:
            self._run_step(step)

    def _run_step(self, step: Callable[[], None]) -> None:
        """Run a step, unless the file is invalid. A field behind the file may be the cause, which is reported then."""
        if self._refusal is None:
            try:
                step()
            except ApiError as error:
                if error.status != 422:
                    raise
                # The frames of its traceback hold the row, until a garbage collection finds the cycle.
                error.__context__ = None
                self._refusal = error.with_traceback(None)

    def _run_or_defer(self, step: Callable[[], None]) -> None:
        """Run a step that processes the file, or queue it while a requested tokenizer is being loaded."""
        if self._wanted_tokenizer is None:
            self._run_step(step)
        else:
            self._deferred.append(step)

    def end_body(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if not self._ended:
            raise _broken_body("it ends before its final boundary")

    def read_more(self) -> bool:
        return self._file.read_more()

    def finish_file(self) -> ImportedFile:
        for name in self._form.required:
            self._check_required(name)
        self._check_format()
        return self._file.finish_dataset(self._dataset_name(), self._request_digest(self._file.sha256_as_it_came))

    def close(self) -> None:
        if self._receiving is not None:
            self._receiving.close()
        if self.tokens is not None:
            self.tokens.close()

    def _on_part_begin(self) -> None:
        self._headers = {}
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _broken_body(f"it has more than {_MAX_PARTS} parts")

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
        if self._part != "file" and self._part not in self._form.fields:
            names = ", ".join(f"`{name}`" for name in self._form.fields)
            raise _field_error(
                to_printable(self._part, 60), "unknown_field", f"the supported parts are `file`, {names}"
            )
        if self._part in self._fields or (self._part == "file" and self._file_name is not None):
            raise _field_error(self._part, "given_twice", f"there are two parts `{self._part}`; send one")
        if self._part == "file":
            self._file_name = options.get(b"filename", b"").decode(errors="replace")
            self._run_or_defer(self._begin_file)
            return
        if self._part in _BEFORE_THE_FILE and self._file_name is not None:
            message = f"must come before the part `file`: curl -F {self._part}=… -F file=@…; the file is read with it"
            raise _field_error(self._part, "after_file", message)
        self._fields[self._part] = bytearray()

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._part == "file":
            self._skipped_bytes += len(piece) if self._refusal is not None else 0
            if self._refusal is not None and self._skipped_bytes > _MAX_SKIPPED_BYTES:
                raise self._refusal
            self._run_or_defer(lambda: self._file.feed(piece))
            return
        field = self._fields[self._part]
        field += piece
        most = _MAX_FIELD_BYTES.get(self._part, _DEFAULT_FIELD_BYTES)
        if len(field) > most:
            raise _field_error(self._part, "too_long", f"may have at most {most:,} bytes")

    def _on_part_end(self) -> None:
        if self._part == "file":
            self._run_or_defer(lambda: self._file.end_file())
        elif self._part == "tokenizer":
            self._wanted_tokenizer = self._text_field("tokenizer") or ""
        elif self._part == "format":
            self._run_or_defer(self._expect_format)
        elif self._part in self._form.required:
            self._check_required(self._part)

    def _on_end(self) -> None:
        self._ended = True

    @property
    def _file(self) -> DatasetImporter:
        if self._receiving is None:
            raise _field_error(
                "file", "missing", "the part `file` is missing; send it, for example with curl -F file=@data.jsonl"
            )
        return self._receiving

    def _begin_file(self) -> None:
        self._receiving = DatasetImporter(self._folder, self._settings, self._import_options())
        self._receiving.begin_file(self._file_name or "")

    def _expect_format(self) -> None:
        self._check_format()
        if self._receiving is not None:
            self._receiving.set_format(self._text_field("format") or "")

    def _import_options(self) -> ImportOptions:
        requested = self._text_field("file_format")
        kind: FileType | None = next((kind for kind in KINDS if kind == requested), None)
        if requested is not None and kind is None:
            raise _field_error("file_format", "unknown_file_format", f"must be one of {', '.join(KINDS)}")
        columns, keeps_original = self._column_sources(), self._form.keeps_original
        return ImportOptions(self._text_field("format"), kind, columns, self.tokens, keeps_original)

    def _column_sources(self) -> dict[str, str] | None:
        raw = self._fields.get("columns")
        if raw is None:
            return None
        try:
            return validate_column_mapping(parse_json(bytes(raw)))
        except BadJson as error:
            raise _field_error("columns", error.code, error.message) from None

    def _check_required(self, name: str) -> None:
        required = self._form.required[name]
        if self._text_field(name) != required:
            raise _field_error(name, "unsupported_value", f"must be `{required}`, the only value that is supported")

    def _check_format(self) -> None:
        requested = self._text_field("format")
        detected = self._receiving.format if self._receiving else None
        if requested is None:
            return
        if requested not in FORMATS:
            raise _field_error("format", "unknown_format", f"must be one of {', '.join(FORMATS)}")
        if detected is not None and detected != requested:
            raise _field_error("format", "format_mismatch", f"the rows have the format {detected}, not {requested}")

    def _request_digest(self, file: str) -> str:
        """Return a digest of the file and the fields; not of the raw body, whose boundary differs each time."""
        fields = {name: value.hex() for name, value in self._fields.items()}
        request = json.dumps([file, self._dataset_name(), fields], sort_keys=True)
        return hashlib.sha256(request.encode()).hexdigest()

    def _dataset_name(self) -> str:
        sent_name = self._text_field("name")
        name = sent_name if sent_name is not None else Path((self._file_name or "").replace("\\", "/")).name
        name = to_printable(name.strip(), 200)
        if sent_name is not None and not name:
            raise _field_error("name", "empty", "must not be empty; leave it out to use the name of the file")
        return name or "data"

    def _text_field(self, name: str) -> str | None:
        raw = self._fields.get(name)
        if raw is None:
            return None
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise _field_error(name, "not_utf8", "must be UTF-8") from None


def validate_column_mapping(value: Any) -> dict[str, str]:
    """Validate a mapping from Anneal's column names to the file's; raises `ApiError`."""
    right = isinstance(value, dict) and all(isinstance(source, str) for source in value.values())
    if not right or not value:
        example = (
            'must map Anneal\'s column names to the file\'s, such as {"prompt": "question", "completion": "answer"}'
        )
        raise _field_error("columns", "wrong_type", example)
    if any(len(name) > MOST_KEY_CHARACTERS for pair in value.items() for name in pair):
        raise _field_error(
            "columns", "key_too_long", f"a column name may have at most {MOST_KEY_CHARACTERS} characters"
        )
    return dict(value)


def _field_error(field: str, code: str, message: str) -> ApiError:
    return invalid([FieldError(field=field, code=code, message=message)])


def _broken_body(why: str) -> ApiError:
    return _field_error("", "broken_multipart", f"the multipart body cannot be read ({to_printable(why, 200)})")
