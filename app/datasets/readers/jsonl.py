"""JSONL reader: one JSON object per line."""

from codecs import BOM_UTF8

from app.datasets.row_writer import RowWriter

_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")


class LineReader:
    """Splits bytes into lines; buffers at most one incomplete line of `most_bytes`."""

    def __init__(self, rows: RowWriter, most_bytes: int) -> None:
        self._rows = rows
        self._most_bytes = most_bytes
        self._line = bytearray()
        self._number = 1
        self._skipping = False
        self._blank_since: int | None = None

    def feed(self, data: bytes) -> None:
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._append_piece(data[start:end])
            self._end_line()
            start = end + 1
        self._append_piece(data[start:] if start else data)

    def end_file(self) -> None:
        if self._line or self._skipping:
            self._end_line()

    def read_more(self) -> bool:
        return False

    def close(self) -> None:
        self._line.clear()

    def _append_piece(self, piece: bytes) -> None:
        if self._skipping:
            return
        if len(self._line) + len(piece) > self._most_bytes:
            # The rest of the line is not buffered: a line of 200 MB takes no more memory than one of 16 MB.
            self._skipping = True
            self._line.clear()
            limit = f"a row may have at most {self._most_bytes:,} bytes; split it, or put each row on its own line"
            self._rows.record_error(f"line {self._number}", "line_too_long", limit)
            return
        self._line += piece

    def _end_line(self) -> None:
        if not self._skipping:
            self._line += b"\n"
            line = bytes(self._line).removeprefix(BOM_UTF8)  # joined files have one in the middle
            self._line.clear()
            self._parse_row(line)
        self._skipping = False
        self._number += 1

    def _parse_row(self, line: bytes) -> None:
        if line.isspace():
            self._blank_since = self._blank_since or self._number
            return
        if self._blank_since is not None:
            # Editors add empty lines at the end of a file; between rows they would shift every line number.
            at, self._blank_since = self._blank_since, None
            self._rows.record_error(f"line {at}", "empty_line", "the line is empty; remove it")
        place = f"line {self._number}"
        if self._number == 1 and line.startswith(_BYTE_ORDER_MARKS):
            self._rows.record_error(place, "byte_order_mark", "the file is UTF-16; save it as UTF-8")
            return
        self._rows.take_json(place, line, is_line=True)
