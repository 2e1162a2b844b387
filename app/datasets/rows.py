"""Rows of a dataset, a page at a time, from the position in its file that the page before returned."""

import json
import os
from pathlib import Path
from typing import Any

from app.api.errors import invalid
from app.contracts.errors import FieldError
from app.contracts.schemas.datasets import DatasetRow, DatasetRows

_MOST_TEXT = 2000
_MOST_ITEMS = 50
_MOST_BYTES = 256 * 1024
_CUT = "… (cut)"


def read(file: Path, cursor: str | None, limit: int) -> DatasetRows:
    """Return at most `limit` rows after a cursor, fewer if they are large; long texts and lists are cut.

    Raises 422 `invalid` for a cursor that is not from the same dataset.
    """
    line, position = _parsed(cursor)
    rows: list[DatasetRow] = []
    size = 0
    with file.open("rb") as stream:
        total = os.fstat(stream.fileno()).st_size
        if position > total:
            raise _unknown_cursor()
        if position > 0:
            stream.seek(position - 1)
            if stream.read(1) != b"\n":
                raise _unknown_cursor()
        while len(rows) < limit and size < _MOST_BYTES and (raw := stream.readline()):
            line += 1
            shown = _cut(json.loads(raw))
            size += len(json.dumps(shown))
            rows.append(DatasetRow(line=line, row=shown))
        end = stream.tell()
    has_more = end < total
    return DatasetRows(data=rows, has_more=has_more, next=f"{line}.{end}" if has_more else None)


def _parsed(cursor: str | None) -> tuple[int, int]:
    if cursor is None:
        return 0, 0
    line, dot, position = cursor.partition(".")
    if not (dot and line.isascii() and line.isdigit() and position.isascii() and position.isdigit()):
        raise _unknown_cursor()
    return int(line), int(position)


def _unknown_cursor() -> Exception:
    message = "is not the `next` of a page of this dataset; leave it out for the first page"
    return invalid([FieldError(field="after", code="unknown_cursor", message=message)])


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _MOST_TEXT else value[:_MOST_TEXT] + _CUT
    if isinstance(value, list):
        return [_cut(one) for one in value[:_MOST_ITEMS]] + ([_CUT] if len(value) > _MOST_ITEMS else [])
    if isinstance(value, dict):
        return {name: _cut(one) for name, one in list(value.items())[:_MOST_ITEMS]}
    return value
