"""Roll-ups of metrics, written with their events, so that a curve of a million points is read from some hundred rows.

A *segment* is a part of an attempt in which steps only increase; a rewind starts the next. For each segment and kind
(`metric`, `eval`) level 0 is one row over everything, level 1 has a row for 16 points, every further level one for four
rows of the level below. The last row of a level is rewritten as it fills, so every level always covers all points.

A row contains an *extent* for each series: `[first_step, first, min_step, min, max_step, max, last_step, last]`, with
null for a non-finite value. Rows of earlier versions have a ninth element, which is ignored.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Connection, text

from anneal.contracts.attempt.messages import StepMetrics
from app.infra.db import join_column
from app.runs.events.log import MEASURED, NewEvent, Stored

NAMED = tuple(name for name in StepMetrics.__annotations__ if name != "step")
POINTS_OF_FIRST = 16
ROWS_OF_NEXT = 4
MOST_STEP = 2**53
VALUES = 8
"""Number of elements that are read from an extent."""
_LOWEST, _HIGHEST = -sys.float_info.max, sys.float_info.max
_FLOATS, _NOTHING = {float}, {type(None)}

Extent = list[Any]
Series = dict[str, Extent]


def points_of(level: int) -> int:
    """Return how many points a full row of this level (1, 2, …) covers."""
    return POINTS_OF_FIRST * int(ROWS_OF_NEXT ** (level - 1))


def highest_level(points: int) -> int:
    """Return the highest level with rows for a segment with this many points."""
    level = 1
    while points > points_of(level):
        level += 1
    return level


def step_of(data: dict[str, Any]) -> int | None:
    """Return the step of a metric or evaluation, if it has a valid one."""
    step = data.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= MOST_STEP else None


def series_values(kind: str, data: dict[str, Any]) -> list[tuple[str, float | None]]:
    """Return the series of one event: numbers, and None for measured values that were not finite."""
    nested = data.get("metrics" if kind == "eval" else "extra")
    more = nested if isinstance(nested, dict) else {}
    cut_out = data.get("non_finite")
    gaps = {name for name in cut_out if isinstance(name, str)} if isinstance(cut_out, list) else set()
    if kind == "eval":
        parts = [("eval.", "metrics.", more)]
    else:
        parts = [("", "", {name: data.get(name) for name in NAMED}), ("extra.", "extra.", more)]
    series: list[tuple[str, float | None]] = []
    for prefix, path, named in parts:
        for name, value in named.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                series.append((prefix + name, float(value) if _LOWEST <= value <= _HIGHEST else None))
            elif value is None and path + name in gaps:
                series.append((prefix + name, None))  # a gap in the curve, not a missing point
    return series


def _join_series(into: Series, later: Series) -> None:
    for name, extent in later.items():
        old = into.get(name)
        if old is None:
            into[name] = list(extent)
            continue
        if extent[3] is not None and (old[3] is None or extent[3] < old[3]):
            old[2], old[3] = extent[2], extent[3]
        if extent[5] is not None and (old[5] is None or extent[5] > old[5]):
            old[4], old[5] = extent[4], extent[5]
        old[6], old[7] = extent[6], extent[7]


@dataclass(slots=True)
class _Place:
    """Position of an event in the log: its number in the attempt, and its `seq` once a transaction has assigned it."""

    number: int
    seq: int = 0


@dataclass(slots=True)
class _Row:
    """Aggregate of consecutive points."""

    number: int
    """Index within its level: 0, 1, 2, …"""
    first: _Place = field(default_factory=lambda: _Place(0))
    """Shared by all rows that begin with this event."""
    last_number: int = 0
    first_step: int = 0
    last_step: int = 0
    points: int = 0
    rows: int = 0
    series: Series = field(default_factory=dict)

    def join_row(self, later: "_Row") -> None:
        if not self.points:
            self.first_step, self.first = later.first_step, later.first
        self.last_step, self.last_number = later.last_step, later.last_number
        self.points += later.points
        self.rows += 1
        _join_series(self.series, later.series)

    def joined_with(self, later: "_Row") -> "_Row":
        both = _Row(
            self.number, self.first, self.last_number, self.first_step, self.last_step, self.points, self.rows,
            {name: list(extent) for name, extent in self.series.items()},
        )  # fmt: skip
        if later.points:
            both.join_row(later)
        return both


class _Points:
    """Points of a row of level 1 as they arrive; their extents are computed only when the row is written."""

    def __init__(self, kind: str, number: int) -> None:
        self.number = number
        self._kind = kind
        self._steps: list[int] = []
        self._data: list[dict[str, Any]] = []
        self._first = _Place(0)
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add_point(self, step: int, number: int, data: dict[str, Any]) -> None:
        """Add a point."""
        if not self._steps:
            self._first = _Place(number)
        self._steps.append(step)
        self._data.append(data)
        self._last_number = number

    def build_row(self) -> _Row:
        """Return the row in its current state."""
        steps = self._steps
        series: Series = {}
        for name, at, numbers in _series_columns(self._kind, steps, self._data):
            _join_series(series, {_storable_name(name): _build_extent(at, numbers)})
        return _Row(self.number, self._first, self._last_number, steps[0], steps[-1], len(steps), 0, series)


def _series_columns(
    kind: str, steps: list[int], events: list[dict[str, Any]]
) -> Iterator[tuple[str, list[int], list[float | None]]]:
    """Yield what `series_values` finds in events, by series, with the steps.

    A series with a finite number in each event, the usual case, is taken as a whole, in a fifth of the time.
    """
    prefix, holder = ("eval.", "metrics") if kind == "eval" else ("extra.", "extra")
    inner = [holders if isinstance(holders := data.get(holder), dict) else {} for data in events]
    parts: list[tuple[str, Iterable[str], list[dict[str, Any]]]] = [(prefix, dict.fromkeys(chain(*inner)), inner)]
    if kind != "eval":
        parts.append(("", NAMED, events))
    has_gaps = any("non_finite" in data for data in events)
    singly: list[dict[str, float | None]] = []
    for prefix, names, holders in parts:
        for name in names:
            column: list[Any] = [data.get(name) for data in holders]
            types = set(map(type, column))
            # A sum of finite numbers may be infinite too: then they are checked one by one.
            if types == _FLOATS and math.isfinite(sum(column)):
                yield prefix + name, steps, column
            elif types != _NOTHING or has_gaps:
                singly = singly or [dict(series_values(kind, data)) for data in events]
                full = prefix + name
                present = [(step, data[full]) for step, data in zip(steps, singly, strict=True) if full in data]
                if present:
                    yield full, [step for step, _ in present], [value for _, value in present]


def _build_extent(steps: list[int], values: list[float | None]) -> Extent:
    finite = [value for value in values if value is not None]
    low, high = (min(finite), max(finite)) if finite else (None, None)
    at_low, at_high = (steps[values.index(low)], steps[values.index(high)]) if finite else (steps[0], steps[0])
    return [steps[0], values[0], at_low, low, at_high, high, steps[-1], values[-1]]


class _Pass:
    """Growing roll-up of one kind in one segment."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._points = _Points(kind, 0)
        """Row of level 1 that is not full yet."""
        self._levels = [_Row(0), _Row(0)]
        """The whole segment without that row; an unused entry; then, by level, the row that is not full yet."""
        self.last_step = -1

    def add_point(self, step: int, number: int, data: dict[str, Any]) -> list[tuple[int, _Row]]:
        """Add a point; return the rows that are full now, with their levels."""
        self.last_step = step
        self._points.add_point(step, number, data)
        if len(self._points) < POINTS_OF_FIRST:
            return []
        row = self._points.build_row()
        self._points = _Points(self._kind, row.number + 1)
        self._levels[0].join_row(row)
        full = [(1, row)]
        for level in range(2, len(self._levels) + 1):
            if level == len(self._levels):
                self._levels.append(_Row(0))
            grows = self._levels[level]
            grows.join_row(row)
            if grows.rows < ROWS_OF_NEXT:
                break
            full.append((level, grows))
            self._levels[level] = _Row(grows.number + 1)
            row = grows
        return full

    def open_rows(self) -> list[tuple[int, _Row]]:
        """Return the rows that are not full yet, in their current state."""
        rows = []
        below = self._points.build_row() if len(self._points) else _Row(0)
        whole = self._levels[0].joined_with(below)
        for level in range(1, len(self._levels)):
            if level > 1:
                below = self._levels[level].joined_with(below)
            if below.points:
                rows.append((level, below))
        return [(0, whole), *rows] if whole.points else []


_COLUMNS = {
    "segment": "int", "kind": "text", "level": "int", "number": "int", "first_step": "bigint", "last_step": "bigint",
    "first_seq": "bigint", "last_seq": "bigint", "points": "bigint", "series": "json",
}  # fmt: skip
# This parses each series once; as one document for all rows, it would be parsed three times.
_UPSERT = text(
    f"""
    INSERT INTO metric_rollups (run_id, attempt, {", ".join(_COLUMNS)})
    SELECT :run_id, :attempt,
        {", ".join(f"cast(string_to_table(:{name}, chr(31)) AS {kind})" for name, kind in _COLUMNS.items())}
    ON CONFLICT (run_id, attempt, segment, kind, level, number) DO UPDATE SET
        last_step = excluded.last_step, last_seq = excluded.last_seq, points = excluded.points,
        series = excluded.series
    """
)


class Rollups:
    """Roll-ups of one attempt; what a failed transaction did not store is written by the next."""

    def __init__(self, run_id: str, attempt: int) -> None:
        self._run_id = run_id
        self._attempt = attempt
        self._segment = 0
        self._kinds = {kind: _Pass(kind) for kind in MEASURED}
        self._taken = 0
        self._has_news = False
        self._full: list[tuple[int, str, int, _Row]] = []

    def store_changes(
        self, connection: Connection, first: int, events: Sequence[NewEvent], stored: Stored | None
    ) -> None:
        """Write the changes by the events number `first`, `first` + 1, …, in the transaction that has stored them.

        Calling it again with the same events, or with more after them, counts each of them once.
        """
        for number, event in enumerate(events, first):
            if number > self._taken:
                self._taken = number
                if event.type in MEASURED:
                    self._take_event(number, event)
        # If the log stored nothing new, an earlier transaction, which seemed to fail, has stored events and roll-ups.
        if self._has_news and stored is not None:
            self._write_rows(connection, stored)

    def note_commit(self) -> None:
        """Note that the transaction of the last `store_changes` has committed."""
        self._full.clear()
        self._has_news = False

    def _take_event(self, number: int, event: NewEvent) -> None:
        data = json.loads(event.data) if event.measured is None else event.measured
        step = step_of(data)
        if step is None:
            return
        mine = self._kinds[event.type]
        if step <= mine.last_step or any(step < other.last_step for other in self._kinds.values()):
            self._full += self._open_rows()
            self._segment += 1
            self._kinds = {kind: _Pass(kind) for kind in MEASURED}
            mine = self._kinds[event.type]
        full = mine.add_point(step, number, data)
        self._full += [(self._segment, event.type, level, row) for level, row in full]
        self._has_news = True

    def _open_rows(self) -> list[tuple[int, str, int, _Row]]:
        return [
            (self._segment, kind, level, row) for kind, grows in self._kinds.items() for level, row in grows.open_rows()
        ]

    def _write_rows(self, connection: Connection, stored: Stored) -> None:
        # Rows that end before `stored` were written together with their events.
        rows = [row for row in (*self._full, *self._open_rows()) if row[3].last_number > stored.number_before]
        if not rows:
            return
        for *_, row in rows:
            if row.first.number > stored.number_before:
                row.first.seq = stored.seq_of(row.first.number)
        records = [
            (
                segment, kind, level, row.number, row.first_step, row.last_step, row.first.seq,
                stored.seq_of(row.last_number), row.points, to_json(row.series).decode(),
            )
            for segment, kind, level, row in rows
        ]  # fmt: skip
        columns = {name: join_column(values) for name, values in zip(_COLUMNS, zip(*records, strict=True), strict=True)}
        connection.execute(_UPSERT, {"run_id": self._run_id, "attempt": self._attempt, **columns})


def _storable_name(name: str) -> str:
    """Replace NUL and lone surrogates, which PostgreSQL's JSON rejects."""
    return name if name.isascii() and "\0" not in name else name.replace("\0", "�").encode(errors="replace").decode()
