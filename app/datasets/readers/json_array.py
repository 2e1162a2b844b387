"""JSON reader: an array of rows, or an object with only the array `data`."""

import re

from app.datasets.row_writer import RowWriter
from app.infra.strict_json import MAX_DEPTH, MAX_VALUES

# A string that ends in the same piece is skipped at once. Possessive quantifiers prevent backtracking.
_OUTSIDE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},"]', re.DOTALL)
_INSIDE = re.compile(rb'["\\]')
_OPENING = re.compile(rb'\s*(?:(\[)|\{\s*"data"\s*:\s*\[)')
_MAX_OPENING_BYTES = 4096


class ArrayReader:
    """Finds the end of each row of the array and parses rows with the strict parser; buffers one incomplete row.

    A general streaming parser such as ijson would buffer a string of any length before it reports it, keep the last of
    duplicate keys, replace lone surrogates, and stop at the first row that is not JSON.
    """

    def __init__(self, rows: RowWriter, most_bytes: int) -> None:
        self._rows = rows
        self._most_bytes = most_bytes
        self._head: bytearray | None = bytearray()
        self._closing = b""
        self._row = bytearray()
        self._number = 1
        self._depth = 0
        self._separators = 0
        self._in_string = False
        self._escaped = False
        self._closed = False
        self._broken = False

    def feed(self, data: bytes) -> None:
        if self._head is not None:
            self._head = (self._head + data).lstrip()
            is_decided = len(self._head) >= _MAX_OPENING_BYTES or _OPENING.match(self._head) is not None
            data = self._open_array() if is_decided else b""
        if data:
            self._scan_rows(data)

    def end_file(self) -> None:
        if self._head is not None and (data := self._open_array()):
            self._scan_rows(data)
        if self._broken:
            return
        if not self._closed:
            self._stop_reading("unfinished_json", f"the file ends before its array is closed, in row {self._number}")
        elif self._closing:
            self._stop_reading("unfinished_json", "the file ends before the object around its rows is closed")

    def read_more(self) -> bool:
        return False

    def close(self) -> None:
        self._row.clear()

    def _open_array(self) -> bytes:
        """Check the start of the file and return the bytes after the opening bracket."""
        head, self._head = bytes(self._head or b""), None
        opening = _OPENING.match(head, 0, _MAX_OPENING_BYTES)
        if opening is not None:
            self._closing = b"" if opening[1] else b"}"
            return head[opening.end() :]
        if not head.strip():
            self._broken = True  # an empty file, which `RowWriter.finish_rows` reports
        else:
            message = 'the file must be an array of rows, [{…}, {…}], or {"data": [{…}, {…}]}, as UTF-8'
            self._stop_reading("not_an_array", message)
        return b""

    def _scan_rows(self, data: bytes) -> None:
        at = start = 0
        while not (self._broken or self._closed):
            if self._escaped:
                at += 1
                self._escaped = False
            mark = (_INSIDE if self._in_string else _OUTSIDE).search(data, at)
            if mark is None:
                self._append_piece(data[start:])
                return
            at, token = mark.end(), mark[0]
            if len(token) > 1:
                continue
            if token == b"\\":
                if at == len(data):
                    self._escaped = True
                    self._append_piece(data[start:])
                    return
                at += 1
            elif token == b'"':
                self._in_string = not self._in_string
            elif token in b"[{":
                self._depth += 1
                if self._depth > MAX_DEPTH:
                    self._append_piece(data[start : mark.start()])
                    self._stop_reading("too_deep", f"nested more than {MAX_DEPTH} levels deep", self._number)
            elif self._depth:
                self._depth -= token in b"]}"
                self._separators += 1
                if self._separators > 2 * MAX_VALUES:  # one before each value, and a bracket after it
                    message = f"more than {MAX_VALUES:,} values in lists and objects; split it"
                    self._append_piece(data[start : mark.start()])
                    self._stop_reading("too_many_values", message, self._number)
            else:
                self._append_piece(data[start : mark.start()])
                start = at
                self._end_row(token)
        if self._closed and not self._broken:
            self._check_trailing(data[start:])

    def _append_piece(self, piece: bytes) -> None:
        if len(self._row) + len(piece) > self._most_bytes:
            self._stop_reading(
                "row_too_long", f"a row may have at most {self._most_bytes:,} bytes; split it", self._number
            )
            self._row.clear()
        elif not self._broken:
            self._row += piece

    def _end_row(self, token: bytes) -> None:
        """Handle a comma or a closing bracket of the outer array: the end of a row."""
        raw = bytes(self._row)
        self._row.clear()
        self._separators = 0
        if token == b"}":
            self._stop_reading("invalid_json", f"not JSON: a }} without a matching {{ in row {self._number}")
        if self._broken:
            return
        self._closed = token == b"]"
        if self._closed and self._number == 1 and not raw.strip():
            return
        self._rows.take_json(f"row {self._number}", raw)
        self._number += 1

    def _check_trailing(self, data: bytes) -> None:
        rest = data.lstrip()
        if self._closing and rest[:1] == self._closing:
            self._closing = b""
            rest = rest[1:].lstrip()
        if rest:
            self._stop_reading(
                "trailing_data", "unexpected content after the array; the object may contain only `data`"
            )

    def _stop_reading(self, code: str, message: str, row: int | None = None) -> None:
        """Report the first error and stop reading, because row boundaries are unknown from here on."""
        if self._broken:
            return
        self._broken = True
        self._rows.record_error("" if row is None else f"row {row}", code, message)
