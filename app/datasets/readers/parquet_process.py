"""`python -m app.datasets.readers.parquet_process FILE BYTES COLUMN…`: print the rows of a Parquet file as JSONL.

The Parquet library is native code and the file is untrusted, so it runs in a separate process with limited memory
and without credentials. The first line is the list of columns; a row may have at most BYTES bytes. Empty cells are
omitted, except those of COLUMN…. A line that starts with `!` says what is wrong with its row.
"""

import base64
import datetime
import decimal
import json
import sys
import uuid
from typing import Any

from app.infra.process.sandbox import run_confined

_BATCH_BYTES = 4 * 1024**2
_MAX_BATCH_ROWS = 1024
_ARROW_BYTES = 4
"""Maximum ratio of Arrow to JSON bytes: a small number in a list takes three bytes as JSON and eight in memory."""


def _write_rows(path: str, most_row_bytes: int, always: set[str]) -> None:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    out = sys.stdout.buffer
    file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1024**2, memory_map=False)
    names = file.schema_arrow.names
    if len(set(names)) < len(names):
        raise ValueError("two of its columns have the same name")
    out.write(json.dumps(names).encode() + b"\n")
    number = 0
    for batch in file.iter_batches(batch_size=_batch_rows(file.metadata), use_threads=False):
        # Rows take many times their size as Python objects, so large rows are checked one by one first.
        step = 1 if batch.nbytes > _BATCH_BYTES else _MAX_BATCH_ROWS
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            if step == 1 and part.nbytes > most_row_bytes * _ARROW_BYTES:
                raise ValueError(f"row {number + 1} is larger than {most_row_bytes:,} bytes")
            for row in part.to_pylist():
                number += 1
                try:
                    out.write(_encode_row(row, always) + b"\n")
                except _NotText as error:
                    out.write(f"!{error}\n".encode(errors="replace"))
    out.flush()


class _NotText(ValueError):
    """Bytes in a column of texts are no text."""


def _encode_row(row: dict[str, Any], always: set[str]) -> bytes:
    # A row has all columns, mostly without a value: a small file could expand to a very large output.
    cells = {
        name: _plain_value(cell, name if name in always else None)
        for name, cell in row.items()
        if name in always or (cell is not None and cell not in ("", b""))
    }
    return json.dumps(cells, ensure_ascii=False).encode(errors="surrogatepass")


def _batch_rows(metadata: Any) -> int:
    """Return the number of rows to decode at once: fewer if they are large."""
    groups = range(metadata.num_row_groups)
    size = sum(metadata.row_group(at).total_byte_size for at in groups)
    # Repeated values are stored once, so rows may be far larger than the metadata says: limit their number.
    return int(max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES * max(metadata.num_rows, 1) // max(size, 1))))


def _plain_value(value: Any, column: str | None) -> Any:
    """Convert a value to JSON types; null members of a struct are omitted, because every row has all of them.

    Many writers store texts as bytes. Bytes that are no text become Base64, or raise `_NotText` in a `column` that
    training needs.
    """
    if isinstance(value, dict):
        return {str(key): _plain_value(item, column) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain_value(item, column) for item in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID | datetime.timedelta):
        return str(value)
    if isinstance(value, bytes):
        return _decode_text(value, column)
    return value


def _decode_text(value: bytes, column: str | None) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        if column is not None:
            message = f"`{column[:40]}` has bytes that are not text in UTF-8; store it as text"
            raise _NotText(message.replace("\n", " ")) from None
        return base64.b64encode(value).decode()


if __name__ == "__main__":
    sys.exit(run_confined(lambda: _write_rows(sys.argv[1], int(sys.argv[2]), set(sys.argv[3:]))))
