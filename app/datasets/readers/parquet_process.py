"""`python -m app.datasets.readers.parquet_process FILE BYTES COLUMN…`: the rows of a Parquet file as lines of JSON.

The library that reads Parquet is native code and the file comes from a stranger: so it runs in a process of its
own, with bounded memory and nothing to steal. The first line is the list of columns; a row may have BYTES. Empty
cells are left out, but for those of COLUMN….
"""

import base64
import datetime
import decimal
import json
import sys
import uuid
from typing import Any

from app.datasets.child import confined

_BATCH_BYTES = 4 * 1024**2
_MOST_BATCH_ROWS = 1024
_ARROW_BYTES = 4
"""Most bytes that Arrow needs for one of JSON: a list of small numbers has three a number, and eight in memory."""


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
        # As objects of this language, rows take many times the room: large ones are looked at one by one first.
        step = 1 if batch.nbytes > _BATCH_BYTES else _MOST_BATCH_ROWS
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            if step == 1 and part.nbytes > most_row_bytes * _ARROW_BYTES:
                raise ValueError(f"row {number + 1} is larger than {most_row_bytes:,} bytes")
            for row in part.to_pylist():
                number += 1
                # A row has all columns, mostly without a value: a small file could make a flood of these.
                cells = {
                    name: _plain(cell)
                    for name, cell in row.items()
                    if name in always or (cell is not None and cell != "")
                }
                out.write(json.dumps(cells, ensure_ascii=False).encode(errors="surrogatepass") + b"\n")
    out.flush()


def _batch_rows(metadata: Any) -> int:
    """Rows that are decoded at once: few where they are large."""
    groups = range(metadata.num_row_groups)
    size = sum(metadata.row_group(at).total_byte_size for at in groups)
    # What repeats is stored once, so a row may be far larger than it says: never many.
    return int(max(1, min(_MOST_BATCH_ROWS, _BATCH_BYTES * max(metadata.num_rows, 1) // max(size, 1))))


def _plain(value: Any) -> Any:
    """A value as JSON has it. Members of a struct that are null are left out: every row has all of them."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID | datetime.timedelta):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


if __name__ == "__main__":
    sys.exit(confined(lambda: _write_rows(sys.argv[1], int(sys.argv[2]), set(sys.argv[3:]))))
