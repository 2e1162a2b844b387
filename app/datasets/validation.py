"""Whether a file of rows (JSONL) can be trained on: read in pieces, judged row by row, in bounded memory."""

import re
from collections.abc import Callable
from typing import Any

from app.errors import FieldError, clean
from app.strict_json import BadJson, parse

MOST_BAD_ROWS = 20
MOST_ROWS = 100_000_000
MOST_COLUMNS = 1000
MOST_KEY_CHARACTERS = 200
PREVIEW_ROWS = 3
ROLES = ("system", "user", "assistant", "tool")
_WORD = re.compile(r"\S")
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


class TooManyBadRows(Exception):
    """The first bad rows are known; reading on would tell nothing new."""


class BadRow(ValueError):
    """Why a row is refused: a stable code, and a sentence that names the place in the row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class RowValidator:
    """Takes the bytes of a file in pieces of any size; `finish` tells what is wrong with it.

    Keeps at most one unfinished line of `max_line_bytes`, three shortened rows and the names of the columns.
    Raises `TooManyBadRows` once 20 rows are bad.
    """

    def __init__(self, format: str | None, max_line_bytes: int) -> None:
        self.format = format
        self.rows = 0
        self.columns: dict[str, None] = {}
        self.preview: list[Any] = []
        self.errors: list[FieldError] = []
        self._max_line_bytes = max_line_bytes
        self._line = bytearray()
        self._number = 1
        self._skipping = False
        self._blank_since: int | None = None

    def feed(self, data: bytes) -> None:
        """The next bytes of the file."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._take(data[start:end])
            self._end_line()
            start = end + 1
        self._take(data[start:] if start else data)

    def finish(self) -> list[FieldError]:
        """The file has ended; answers what is wrong, nothing when it can be trained on."""
        if self._line or self._skipping:
            self._end_line()
        if not self.rows and not self.errors:
            self._refuse("", "empty_file", "the file has no rows; each line must be a JSON object")
        return self.errors

    def _take(self, piece: bytes) -> None:
        if self._skipping:
            return
        if len(self._line) + len(piece) > self._max_line_bytes:
            # The rest of the line is never kept: a line of 200 MB costs no more than a line of 16.
            self._skipping = True
            self._line.clear()
            limit = f"a row may have {self._max_line_bytes:,} bytes; split it, or put each row on its own line"
            self._bad("line_too_long", limit)
            return
        self._line += piece

    def _end_line(self) -> None:
        if not self._skipping:
            self._row(bytes(self._line))
            self._line.clear()
        self._skipping = False
        self._number += 1

    def _row(self, line: bytes) -> None:
        if not line.strip():
            self._blank_since = self._blank_since or self._number
            return
        if self._blank_since is not None:
            # Empty lines at the end of a file are an editor's habit; between rows they shift every number.
            at, self._blank_since = self._blank_since, None
            self._refuse(f"line {at}", "empty_line", "the line is empty; remove it")
        if self._number == 1 and line.startswith(_BYTE_ORDER_MARKS):
            self._bad("byte_order_mark", "the file starts with a byte order mark; save it as plain UTF-8")
            return
        try:
            row = parse(line)
            self._check(row)
        except (BadRow, BadJson) as error:
            self._bad(error.code, error.message)
            return
        self.rows += 1
        if len(self.preview) < PREVIEW_ROWS:
            self.preview.append(shortened(row))

    def _check(self, row: Any) -> None:
        if not isinstance(row, dict):
            raise BadRow("not_an_object", 'a row must be a JSON object such as {"text": "…"}, alone on its line')
        if self.rows >= MOST_ROWS:
            raise BadRow("too_many_rows", f"a data set may have {MOST_ROWS:,} rows")
        if self.format is None:
            self.format = detect(row)
        _FORMATS[self.format](row)
        if not row.keys() <= self.columns.keys():
            self._add_columns(row)

    def _add_columns(self, row: dict[str, Any]) -> None:
        for key in row:
            if len(key) > MOST_KEY_CHARACTERS:
                raise BadRow("key_too_long", f"a column name may have {MOST_KEY_CHARACTERS} characters")
        if len(self.columns.keys() | row.keys()) > MOST_COLUMNS:
            raise BadRow("too_many_columns", f"a data set may have {MOST_COLUMNS:,} columns")
        self.columns.update(dict.fromkeys(row))

    def _bad(self, code: str, message: str) -> None:
        self._refuse(f"line {self._number}", code, message)

    def _refuse(self, field: str, code: str, message: str) -> None:
        self.errors.append(FieldError(field=field, code=code, message=clean(message, 300)))
        if len(self.errors) >= MOST_BAD_ROWS:
            raise TooManyBadRows


def detect(row: dict[str, Any]) -> str:
    """The format that the columns of `row` belong to."""
    found = [name for name, columns in _COLUMNS.items() if columns <= row.keys()]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadRow(
            "ambiguous_format",
            f"the row could be {' or '.join(found)}; name the `format` in a field before the file",
        )
    columns = ", ".join(f"`{key[:40]}`" for key in list(row)[:10]) or "none"
    raise BadRow(
        "unknown_format",
        f"the columns are {columns}; a row needs `messages` (chat), `prompt` and `completion` "
        "(prompt_completion) or `text` (text)",
    )


def shortened(row: Any) -> Any:
    """`row` with long texts cut and big lists and objects ended early, for a look at it."""
    left = [100]

    def short(value: Any) -> Any:
        left[0] -= 1
        if isinstance(value, str):
            return value if len(value) <= 300 else value[:299] + "…"
        if isinstance(value, list):
            return [short(item) for item in value[:20] if left[0] > 0]
        if isinstance(value, dict):
            return {key[:MOST_KEY_CHARACTERS]: short(item) for key, item in list(value.items())[:50] if left[0] > 0}
        # An integer of thousands of digits is valid JSON and of no use to look at.
        return value if not isinstance(value, int) or abs(value) < 10**18 else clean(str(value), 40)

    return short(row)


def _chat(row: dict[str, Any]) -> None:
    messages = _present(row, "messages", "chat")
    if not isinstance(messages, list) or not messages:
        raise BadRow("wrong_type", "`messages` must be a list of at least one message")
    answered = False
    for at, message in enumerate(messages):
        place = f"messages[{at}]"
        if not isinstance(message, dict):
            raise BadRow("wrong_type", f'`{place}` must be an object such as {{"role": "user", "content": "…"}}')
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRow("unknown_role", f"`{place}.role` must be one of {', '.join(ROLES)}")
        _text(message, "content", place)
        if len(message) != 2:
            extra = next(key for key in message if key not in ("role", "content"))
            raise BadRow(
                "unknown_key", f"`{place}` has `{extra[:40]}`; a message has `role` and `content`, nothing else"
            )
        answered = answered or role == "assistant"
    if not answered:
        raise BadRow("no_assistant_message", "`messages` has no message of the assistant: nothing to learn from")


def _prompt_completion(row: dict[str, Any]) -> None:
    _present(row, "prompt", "prompt_completion")
    _present(row, "completion", "prompt_completion")
    _text(row, "prompt")
    _text(row, "completion")


def _plain_text(row: dict[str, Any]) -> None:
    _present(row, "text", "text")
    _text(row, "text")


def _present(row: dict[str, Any], column: str, format: str) -> Any:
    if column not in row:
        raise BadRow("missing_column", f"there is no `{column}`; every row of the format {format} needs it")
    return row[column]


def _text(holder: dict[str, Any], key: str, place: str = "") -> None:
    name = f"{place}.{key}" if place else key
    text = holder.get(key)
    if not isinstance(text, str):
        raise BadRow("wrong_type", f"`{name}` must be a text")
    if _WORD.search(text) is None:
        raise BadRow("empty_text", f"`{name}` is empty; fill it or leave the row out")


_COLUMNS: dict[str, set[str]] = {
    "chat": {"messages"},
    "prompt_completion": {"prompt", "completion"},
    "text": {"text"},
}
_FORMATS: dict[str, Callable[[dict[str, Any]], None]] = {
    "chat": _chat,
    "prompt_completion": _prompt_completion,
    "text": _plain_text,
}
FORMATS = tuple(_FORMATS)
