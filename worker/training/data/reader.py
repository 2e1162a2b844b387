"""Rows of a dataset's file: read in file order, encoded in batches; all bad rows are reported together."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from worker.training.data.token_cache import TokenCache
from worker.training.data.tokenization import BadRow, Encoder
from worker.training.failures import TrainingFailure

_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 256 * 1024
"""Limit of what one call encodes, which a stop request cannot interrupt."""
_THREADS = min(len(os.sched_getaffinity(0)), 8)
"""Number of encoding threads; more would wait for the thread that reads the rows."""
_MAX_BAD_ROWS_NAMED = 20
_SECONDS_BETWEEN_PROGRESS = 0.5
_UNUSABLE = (BadRow, KeyError, TypeError, IndexError)

Progress = Callable[[int, int], None]
"""Callback with the rows done and the rows in total; may raise to stop."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class RowSource:
    """Rows of a file, and how to read them."""

    path: str
    format: str
    sha256: str | None
    """Digest of the file; None: the result is not kept for later runs."""
    chosen: list[int] | None
    """Numbers of the rows; None: all."""
    purpose: str
    """Name of the data in messages: `training`, `evaluation`, or an extra evaluation set."""
    progress: Progress
    cache: TokenCache


def count_rows(path: str) -> int:
    """Count the rows of a JSONL file, without blank lines."""
    with open(path, "rb") as file:  # noqa: PTH123
        return sum(1 for line in file if line.strip())


def has_weights(path: str) -> bool:
    """Return True if a message of a chat in a file has a `weight`."""
    return _any_row(path, b'"weight"', lambda row: any(one.get("weight") is not None for one in row["messages"]))


def has_margins(path: str) -> bool:
    """Return True if a pair in a file has a `margin`."""
    return _any_row(path, b'"margin"', lambda row: row["margin"] is not None)


def _any_row(path: str, key: bytes, condition: Callable[[Any], bool]) -> bool:
    """Return True if a row of a file meets a condition, which only rows with `key` in their text can."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return any(key in raw and _meets_condition(raw, condition) for raw in file)
    except FileNotFoundError:
        return False  # reported when the rows are read


def _meets_condition(raw: bytes, condition: Callable[[Any], bool]) -> bool:
    try:
        return condition(json.loads(raw))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return False  # reported when the rows are read


def encode_rows(
    path: str, encoder: Encoder[Result], *, chosen: list[int] | None, progress: Progress, purpose: str
) -> Iterator[tuple[int, Result]]:
    """Yield the number (from 0) and encoding of the `chosen` rows (None: all) of a file, in file order.

    `purpose` is the name of the data in messages.

    Raises:
        TrainingFailure: `bad_data` that names the rows which cannot be used, after all rows have been read.
    """
    numbers = None if chosen is None else set(chosen)
    total = count_rows(path) if chosen is None else len(chosen)
    bad = _BadRows()
    done = 0
    reported_at = 0.0

    def counted_rows() -> Iterator[_Row]:
        nonlocal done, reported_at
        for row in _read_rows(path, bad):
            if numbers is None or row.number in numbers:
                done += 1
                if time.monotonic() - reported_at > _SECONDS_BETWEEN_PROGRESS:
                    reported_at = time.monotonic()
                    progress(done, total)
                yield row

    for number, result in _encode_in_threads(counted_rows(), encoder, bad):
        if not bad.count:
            yield number, result
    if bad.count:
        raise TrainingFailure("bad_data", f"Rows of the {purpose} data cannot be used: {bad}")
    progress(done, total)


@dataclass
class _BadRows:
    """The first rows that cannot be used, and their total number."""

    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add_row(self, line: int, why: str) -> None:
        self.count += 1
        # Rows are encoded in groups, so errors do not arrive in file order.
        self.first = sorted([*self.first, (line, why)])[:_MAX_BAD_ROWS_NAMED]

    def __str__(self) -> str:
        more = "" if self.count <= _MAX_BAD_ROWS_NAMED else f" (and {self.count - _MAX_BAD_ROWS_NAMED} more)"
        return "; ".join(f"line {line}: {why}" for line, why in self.first) + more


class _Row(NamedTuple):
    number: int
    """Index among the rows, from 0."""
    line: int
    """Line in the file, from 1."""
    bytes: int
    content: dict[str, Any]


_Outcome: TypeAlias = tuple[_Row, Result | None, str | None]
"""A row, and its encoding or the reason why it has none."""


def _read_rows(path: str, bad: _BadRows) -> Iterator[_Row]:
    number = 0
    with open(path, "rb") as file:  # noqa: PTH123
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            number += 1
            try:
                row = json.loads(raw)
            except (ValueError, RecursionError) as error:
                bad.add_row(line, f"not JSON ({error})")
                continue
            if not isinstance(row, dict):
                bad.add_row(line, "not an object")
                continue
            yield _Row(number - 1, line, len(raw), row)


def _encode_in_threads(rows: Iterator[_Row], encoder: Encoder[Result], bad: _BadRows) -> Iterator[tuple[int, Result]]:
    """Yield the number and encoding of each usable row; the next rows are read while some are encoded."""
    pending: deque[Future[list[_Outcome[Result]]]] = deque()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="tokens") as pool:
        try:
            for group in _row_groups(rows, encoder, bad):
                pending.append(pool.submit(_encode_group, group, encoder))
                if len(pending) > _THREADS:
                    yield from _usable_results(pending.popleft().result(), bad)
            while pending:
                yield from _usable_results(pending.popleft().result(), bad)
        finally:
            for future in pending:
                future.cancel()


def _row_groups(rows: Iterator[_Row], encoder: Encoder[Any], bad: _BadRows) -> Iterator[list[tuple[_Row, Any]]]:
    """Yield the rows that are encoded in one call, each with its prepared form."""
    group: list[tuple[_Row, Any]] = []
    size = 0
    for row in rows:
        try:
            group.append((row, encoder.prepare(row.content, row.number)))
        except _UNUSABLE as error:
            bad.add_row(row.line, _bad_row_reason(error))
            continue
        size += row.bytes
        if len(group) == _ROWS_AT_ONCE or size > _BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode_group(group: list[tuple[_Row, Any]], encoder: Encoder[Result]) -> list[_Outcome[Result]]:
    """Return the encoding of each row, or the reason why it has none."""
    try:
        results = encoder.encode([prepared for _, prepared in group])
        return [(row, result, None) for (row, _), result in zip(group, results, strict=True)]
    except _UNUSABLE as error:
        if len(group) == 1:
            return [(group[0][0], None, _bad_row_reason(error))]
    return [_encode_group([one], encoder)[0] for one in group]  # finds the bad row


def _usable_results(outcomes: list[_Outcome[Result]], bad: _BadRows) -> Iterator[tuple[int, Result]]:
    for row, result, why in outcomes:
        if why is not None:
            bad.add_row(row.line, why)
        elif result is not None:
            yield row.number, result


def _bad_row_reason(error: Exception) -> str:
    return f"field {error} is missing" if isinstance(error, KeyError) else str(error)
