"""Row writer: renames the columns of each row, validates it, counts its tokens and writes it."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from anneal.contracts.errors import FieldError
from app.api.errors import to_printable
from app.datasets import formats
from app.datasets.messages import BadRow, Row
from app.datasets.token_counter import TokenCounter
from app.infra.strict_json import BadJson, parse_json, parse_with_gaps

MOST_BAD_ROWS = 20
MOST_ROWS = 100_000_000
MOST_COLUMNS = 1000
MOST_KEY_CHARACTERS = 200
PREVIEW_ROWS = 3


class TooManyBadRows(Exception):
    """Raised to stop reading: the maximum number of bad rows was reached, or no row can be read."""


class RowWriter:
    """Accepts rows from a reader and passes the valid ones to `write` as lines of JSON.

    `sources` maps Anneal's column names to those of the file. Keeps three shortened rows for the preview and the
    names of all columns. Raises `TooManyBadRows` once 20 rows are invalid.
    """

    def __init__(
        self,
        format: str | None,
        write: Callable[[bytes], None],
        sources: Mapping[str, str] | None = None,
        tokens: TokenCounter | None = None,
    ) -> None:
        self.format = format
        self.count = 0
        self.columns: dict[str, None] = {}
        self.preview: list[Any] = []
        self.errors: list[FieldError] = []
        self.layout: str | None = None
        """Layout of the first row, if its columns are converted; see `formats.layout_of`."""
        self.file = ""
        """Prefix of error locations when a dataset consists of several files."""
        self._write = write
        self._sources = dict(sources or {})
        self._tokens = tokens
        self._is_table = False

    @property
    def needed(self) -> list[str]:
        """Columns of the file that a format requires, so that an empty cell is an error."""
        moved = [source for name, source in self._sources.items() if name in formats.REQUIRED_COLUMNS]
        return [*formats.REQUIRED_COLUMNS, *moved]

    def begin_table(self, columns: Iterable[str]) -> None:
        """Start a table with these columns: empty cells of its rows mean no value, and lists are given as JSON.

        Raises `TooManyBadRows` if columns are missing or belong to no format.
        """
        self._is_table = True
        there = list(columns)
        # A header may have lost the spaces with which `columns` names it.
        self._sources = {name: self._header_name(source, there) for name, source in self._sources.items()}
        if missing := [f"`{source[:40]}`" for source in self._sources.values() if source not in there]:
            known = ", ".join(f"`{name[:40]}`" for name in there[:20])
            self.record_error("", "unknown_column", f"the file has no column {', '.join(missing)}; it has {known}")
            raise TooManyBadRows
        if self.format is None:
            taken = set(self._sources.values())
            try:
                self.format = formats.detect_format([*self._sources, *(name for name in there if name not in taken)])
            except BadRow as error:
                self.record_error("", error.code, error.message)
                raise TooManyBadRows from None

    @staticmethod
    def _header_name(source: str, there: list[str]) -> str:
        return source if source in there else source.strip()

    def add_row(self, place: str, row: Any, raw: bytes | None = None) -> None:
        """Add a row; `raw` is its original line, which is written unchanged if the row does not change."""
        try:
            valid_row = self._validate_row(row)
        except BadRow as error:
            self.record_error(place, error.code, error.message)
            return
        self.count += 1
        if len(self.preview) < PREVIEW_ROWS:
            self.preview.append(shorten_row(valid_row))
        if self._tokens is not None:
            if self.format == "tokenized":
                self._tokens.add_length(len(valid_row["input_ids"]))
            for texts in formats.sequences_of(self.format or "", valid_row):
                self._tokens.add_sequence(texts)
        self._write(raw if raw is not None and valid_row is row else line_of(valid_row))

    def take_json(self, place: str, raw: bytes, *, is_line: bool = False) -> None:
        """Parse a row from JSON and add it; NaN and infinite numbers become null, which a needed column refuses."""
        try:
            row, has_gaps = parse_with_gaps(raw)
        except BadJson as error:
            self.record_error(place, error.code, error.message)
            return
        self.add_row(place, row, raw if is_line and not has_gaps else None)

    def record_error(self, place: str, code: str, message: str) -> None:
        """Record an error; an empty `place` refers to the file as a whole."""
        place = f"{self.file} {place}" if self.file and place else place
        self.errors.append(FieldError(field=to_printable(place, 200), code=code, message=to_printable(message, 300)))
        if len(self.errors) >= MOST_BAD_ROWS:
            raise TooManyBadRows

    def finish_rows(self) -> list[FieldError]:
        """Return all errors after the last row; empty if the rows are valid."""
        if not self.count and not self.errors:
            self.record_error("", "empty_file", "the file has no rows; it needs at least one")
        return self.errors

    def _validate_row(self, row: Any) -> Row:
        if not isinstance(row, dict):
            raise BadRow(
                "not_an_object",
                'a row must be a JSON object such as {"text": "…"}: one per line in a JSONL file, or an element of the '
                "array in a .json file",
            )
        if self.count >= MOST_ROWS:
            raise BadRow("too_many_rows", f"a dataset may have at most {MOST_ROWS:,} rows")
        if self._sources:
            row = self._rename_columns(row)
        if self._is_table:
            row = {name: self._parse_cell(name, value) for name, value in row.items() if _has_value(name, value)}
        if self.format is None:
            self.format = formats.detect_row_format(row)
        if not self.count:
            self.layout = formats.layout_of(row) if self.format == "chat" else None
        valid_row = formats.validate_row(self.format, row)
        if not valid_row.keys() <= self.columns.keys():
            self._add_columns(valid_row)
        return valid_row

    def _parse_cell(self, name: str, value: Any) -> Any:
        if not isinstance(value, str) or not formats.is_json(name, self.format):
            return value
        try:
            return parse_json(value.encode(errors="surrogatepass"))
        except BadJson as error:
            raise BadRow(
                error.code, f"`{name}` must contain JSON, such as a list of messages: {error.message}"
            ) from None

    def _rename_columns(self, row: Row) -> Row:
        moved = {name: row[source] for name, source in self._sources.items() if source in row}
        taken = set(self._sources.values())
        rest = {name: value for name, value in row.items() if name not in taken}
        if twice := sorted(moved.keys() & rest.keys()):
            raise BadRow(
                "column_conflict",
                f"`{twice[0][:40]}` already exists, so `{self._sources[twice[0]][:40]}` cannot be renamed to it; "
                "rename one in the file",
            )
        return {**moved, **rest}

    def _add_columns(self, row: Row) -> None:
        for key in row:
            if len(key) > MOST_KEY_CHARACTERS:
                raise BadRow("key_too_long", f"a column name may have at most {MOST_KEY_CHARACTERS} characters")
        if len(self.columns.keys() | row.keys()) > MOST_COLUMNS:
            raise BadRow("too_many_columns", f"a dataset may have at most {MOST_COLUMNS:,} columns")
        self.columns.update(dict.fromkeys(row))


def _has_value(name: str, value: Any) -> bool:
    return name in formats.REQUIRED_COLUMNS or (value is not None and value != "")


def line_of(row: Row) -> bytes:
    """Serialize a row as one line of the stored file."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def shorten_row(row: Any) -> Any:
    """Return a copy of `row` with long texts, lists and objects truncated, for the preview."""
    left = [100]

    def shorten_value(value: Any) -> Any:
        left[0] -= 1
        if isinstance(value, str):
            return value if len(value) <= 300 else value[:299] + "…"
        if isinstance(value, list):
            return [shorten_value(item) for item in value[:20] if left[0] > 0]
        if isinstance(value, dict):
            return {
                key[:MOST_KEY_CHARACTERS]: shorten_value(item) for key, item in list(value.items())[:50] if left[0] > 0
            }
        # An integer of thousands of digits is valid JSON but useless in a preview.
        return value if not isinstance(value, int) or abs(value) < 10**18 else to_printable(str(value), 40)

    return shorten_value(row)
