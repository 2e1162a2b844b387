"""The rows of a data set's file, one at a time; all that cannot be used are told together."""

import json
import time
from collections.abc import Callable
from typing import Any

from worker.training.encoding import BadRow
from worker.training.failures import TrainingFailure
from worker.training.rows import count_rows

_BAD_ROWS_TOLD = 20
_SECONDS_BETWEEN_PROGRESS = 0.5

Take = Callable[[int, dict[str, Any]], None]
"""Takes a row, by its number among the rows (from 0); raises `BadRow`, `KeyError` or `TypeError` where it cannot."""


def take_rows(
    path: str, chosen: list[int] | None, purpose: str, progress: Callable[[int, int], None], take: Take
) -> int:
    """Hand the `chosen` rows (None: all) of a JSONL file to `take`, in its order; returns how many there were.

    `purpose` is what messages call the data; `progress` hears of rows done and rows in all, and may raise to stop.

    Raises:
        TrainingFailure: `bad_data` that names the lines of rows that cannot be used.
    """
    wanted = None if chosen is None else set(chosen)
    total = count_rows(path) if chosen is None else len(chosen)
    bad: list[str] = []
    number, done, told = -1, 0, 0.0
    with open(path, "rb") as file:  # noqa: PTH123
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            number += 1
            if wanted is not None and number not in wanted:
                continue
            done += 1
            if time.monotonic() - told > _SECONDS_BETWEEN_PROGRESS:
                told = time.monotonic()
                progress(done, total)
            try:
                take(number, _row(raw))
            except (BadRow, KeyError, TypeError, IndexError) as error:
                why = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
                bad.append(f"line {line}: {why}" if len(bad) < _BAD_ROWS_TOLD else "")
    if bad:
        more = "" if len(bad) <= _BAD_ROWS_TOLD else f" (and {len(bad) - _BAD_ROWS_TOLD} more)"
        raise TrainingFailure(
            "bad_data", f"Rows of the {purpose} data cannot be used: " + "; ".join(bad[:_BAD_ROWS_TOLD]) + more
        )
    progress(done, total)
    return done


def _row(raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadRow("not an object")
    return row
