"""Rows of a dataset, a page at a time, from the position in its file that the page before returned."""

import json
import os
from typing import Any, BinaryIO

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.datasets import DatasetRow, DatasetRows
from app.api.errors import conflict, invalid

_MOST_TEXT = 2000
_MOST_ITEMS = 50
_MOST_OF_A_ROW = 128 * 1024
"""Characters of all values of a row."""

_MOST_BYTES = 256 * 1024
_CUT = "… (cut)"


def read_rows(file: BinaryIO, cursor: str | None, limit: int) -> DatasetRows:
    """Return at most `limit` rows after a cursor, fewer if they are large; long texts and lists are cut. Closes `file`.

    Raises 422 `invalid` for a cursor that is not from the same dataset, 409 for content that is not what was stored.
    """
    line, position = _parse_cursor(cursor)
    rows: list[DatasetRow] = []
    size = 0
    with file as stream:
        total = stream.seek(0, os.SEEK_END)
        if position > total:
            raise _unknown_cursor()
        stream.seek(max(position - 1, 0))
        if position > 0 and stream.read(1) != b"\n":
            raise _unknown_cursor()
        while len(rows) < limit and size < _MOST_BYTES and (raw := stream.readline()):
            line += 1
            cut_row = _Cut().cut_value(_parsed_row(raw, line))
            size += len(json.dumps(cut_row))
            rows.append(DatasetRow(line=line, row=cut_row))
        end = stream.tell()
    has_more = end < total
    return DatasetRows(data=rows, has_more=has_more, next=f"{line}.{end}" if has_more else None)


def _parsed_row(raw: bytes, line: int) -> dict[str, Any]:
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):  # what was stored was valid
        row = None
    if not isinstance(row, dict):
        raise conflict(
            "content_corrupt",
            f"Row {line} of the dataset in the storage is not what was stored; upload it again, or restore the "
            "storage.",
        )
    return row


def _parse_cursor(cursor: str | None) -> tuple[int, int]:
    if cursor is None:
        return 0, 0
    line, dot, position = cursor.partition(".")
    if not (dot and line.isascii() and line.isdigit() and position.isascii() and position.isdigit()):
        raise _unknown_cursor()
    return int(line), int(position)


def _unknown_cursor() -> Exception:
    message = "is not the `next` of a page of this dataset; leave it out for the first page"
    return invalid([FieldError(field="after", code="unknown_cursor", message=message)])


class _Cut:
    """Cuts the values of one row: each text, list and object to its limit, and all together to that of a row."""

    def __init__(self) -> None:
        self._left = _MOST_OF_A_ROW

    def cut_value(self, value: Any) -> Any:
        if isinstance(value, str):
            text = value[: min(_MOST_TEXT, self._left)]
            self._left -= len(text)
            return value if len(text) == len(value) else text + _CUT
        if isinstance(value, list):
            items = [self.cut_value(one) for one in value[:_MOST_ITEMS] if self._left > 0]
            return items if len(items) == len(value) else [*items, _CUT]
        if isinstance(value, dict):
            members = {name: self.cut_value(one) for name, one in list(value.items())[:_MOST_ITEMS] if self._left > 0}
            self._left -= sum(map(len, members))
            return members if len(members) == len(value) else {**members, "…": _CUT}
        self._left -= 1
        return value
