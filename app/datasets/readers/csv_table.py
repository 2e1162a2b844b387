"""Reader of tables as text: a header, then one record per row (RFC 4180), cells between delimiters, in UTF-8."""

import csv
import re
from codecs import BOM_UTF8
from collections import Counter

from app.datasets.row_writer import MOST_COLUMNS, MOST_KEY_CHARACTERS, RowWriter, TooManyBadRows

# Disables the csv module's limit of 128 KiB per cell: the size of the whole record is checked before parsing.
csv.field_size_limit(2**31 - 1)
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab"}
"""Names of the delimiters, in the order in which a header is searched for them."""
# One cell and its terminator. Possessive quantifiers prevent backtracking.
_CELLS = {
    d: re.compile(rb'(?:"[^"]*+(?:""[^"]*+)*+"[^%(d)b]*+|[^"%(d)b][^%(d)b]*+|)(?:%(d)b|\Z)' % {b"d": d.encode()})
    for d in DELIMITERS
}
_QUOTED = re.compile(rb'"[^"]*+"')
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")


class TableReader:
    """Splits bytes into records and cells; buffers at most one incomplete record of `most_bytes`.

    `delimiter` of None: the first of `DELIMITERS` that the header contains outside quotes, or else a comma.
    """

    def __init__(self, rows: RowWriter, most_bytes: int, delimiter: str | None = None) -> None:
        self.delimiter = delimiter
        self._rows = rows
        self._most_bytes = most_bytes
        self._record = bytearray()
        self._quotes = 0
        self._skipping = False
        self._line = 1
        self._began = 1
        self._blank_since: int | None = None
        self._columns: list[str] | None = None

    def feed(self, data: bytes) -> None:
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._append_piece(data[start : end + 1])
            start = end + 1
            self._line += 1
            # A record continues on the next line if a quote is still open.
            if self._quotes % 2 == 0:
                self._end_record()
        self._append_piece(data[start:] if start else data)

    def end_file(self) -> None:
        if self._quotes % 2:
            self._record_error("unfinished_csv", 'the quoted cell that starts here has no closing "')
        elif self._record or self._skipping:
            self._end_record()

    def read_more(self) -> bool:
        return False

    def close(self) -> None:
        self._record.clear()

    def _append_piece(self, piece: bytes) -> None:
        self._quotes += piece.count(b'"')
        if self._skipping:
            return
        if len(self._record) + len(piece) > self._most_bytes:
            self._skipping = True
            self._record.clear()
            limit = f'a row may have at most {self._most_bytes:,} bytes; split it, or close the " of its cells'
            self._record_error("row_too_long", limit)
            return
        self._record += piece

    def _end_record(self) -> None:
        if not self._skipping:
            self._take_record(bytes(self._record))
            self._record.clear()
        self._skipping = False
        self._quotes = 0
        self._began = self._line

    def _take_record(self, record: bytes) -> None:
        if not record.strip():
            self._blank_since = self._blank_since or self._began
            return
        if self._blank_since is not None:
            at, self._blank_since = self._blank_since, None
            self._rows.record_error(f"line {at}", "empty_line", "the line is empty; remove it")
        cells = self._split_cells(record.removeprefix(BOM_UTF8))  # joined files have one in the middle
        if self._columns is None:
            self._columns = self._check_header(None if cells is None else [name.strip() for name in cells])
        elif cells is None:
            return
        elif [cell.strip() for cell in cells] == self._columns:
            self._record_error("repeated_header", "the line repeats the header, as in joined files; remove it")
        elif len(cells) != len(self._columns):
            self._refuse_cells(str(len(cells)))
        elif any("\0" in cell for cell in cells):
            self._record_error("nul_in_text", "text has a NUL character, which cannot be stored; remove it")
        else:
            self._rows.add_row(f"line {self._began}", dict(zip(self._columns, cells, strict=True)))

    def _split_cells(self, record: bytes) -> list[str] | None:
        """Return the cells of a record, or None after reporting an error if it is invalid."""
        if self._began == 1 and record.startswith(_BYTE_ORDER_MARKS):
            self._record_error("byte_order_mark", "the file is UTF-16; save it as CSV in UTF-8")
            return None
        if self.delimiter is None:
            self.delimiter = _delimiter_of(record)
        if _has_many_cells(record, self.delimiter):
            self._refuse_cells(f"more than {MOST_COLUMNS:,}")
            return None
        try:
            return next(csv.reader([record.decode()], strict=True, delimiter=self.delimiter))
        except UnicodeDecodeError as error:
            self._record_error("not_utf8", f"byte {error.start} of the row is not UTF-8; save the file as CSV in UTF-8")
        except (csv.Error, StopIteration) as error:
            remedy = 'quote cells that contain a " or a line break, and write the " twice'
            self._record_error("invalid_csv", f"not CSV: {error}; {remedy}")
        return None

    def _check_header(self, names: list[str] | None) -> list[str]:
        """Check and return the column names; raises `TooManyBadRows`, because rows need a valid header."""
        why = None
        if names is None:
            raise TooManyBadRows
        if not all(name.strip() for name in names):
            why = ("missing_column_name", "a column has no name; the first line must name every column")
        elif len(set(names)) < len(names):
            twice, _ = Counter(names).most_common(1)[0]
            why = ("duplicate_column", f"the column `{twice[:40]}` occurs twice; rename one")
        elif any("\0" in name for name in names):
            why = ("nul_in_text", "the name of a column has a NUL character; remove it")
        elif any(len(name) > MOST_KEY_CHARACTERS for name in names):
            why = ("key_too_long", f"a column name may have at most {MOST_KEY_CHARACTERS} characters")
        if why is not None:
            self._record_error(*why)
            raise TooManyBadRows
        self._rows.begin_table(names)
        return names

    def _refuse_cells(self, count: str) -> None:
        if self._columns is None:
            self._record_error("too_many_columns", f"a dataset may have at most {MOST_COLUMNS:,} columns")
            return
        delimiter = DELIMITERS[self.delimiter or ","]
        message = (
            f"the row has {count} cells but the header has {len(self._columns)}; quote cells that contain a {delimiter}"
        )
        self._record_error("wrong_cell_count", message)

    def _record_error(self, code: str, message: str) -> None:
        self._rows.record_error(f"line {self._began}", code, message)


def _delimiter_of(header: bytes) -> str:
    unquoted = _QUOTED.sub(b"", header)
    return next((delimiter for delimiter in DELIMITERS if delimiter.encode() in unquoted), ",")


def _has_many_cells(record: bytes, delimiter: str) -> bool:
    """Return True if a record has too many cells. Checked first, because parsed cells take 30 times their bytes."""
    end = delimiter.encode()
    if record.count(end) < MOST_COLUMNS:
        return False
    at = 0
    for _ in range(MOST_COLUMNS):
        cell = _CELLS[delimiter].match(record, at)
        if cell is None or not cell[0].endswith(end):
            return False
        at = cell.end()
    return True
