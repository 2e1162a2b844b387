"""Roll-ups of metrics, made while they are stored, so that a curve of a million points is read from some hundred rows.

A *pass* is a stretch of an attempt in which steps only rise; a rewind begins the next. Of each pass and kind (`metric`,
`eval`) level 0 is one row over everything, level 1 has a row for 16 points, every further level one for four rows of
the level below. The last row of a level is rewritten as it fills, so every level covers all points at any time.

A row holds an *extent* for each series: `[first_step, first, min_step, min, max_step, max, last_step, last, count]`,
with null for a value that was no finite number.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, text

from app.events.log import NewEvent, Stored

KINDS = ("metric", "eval")
NAMED = ("epoch", "loss", "learning_rate", "grad_norm", "gpu_memory_mb", "samples_per_second")
POINTS_OF_FIRST = 16
ROWS_OF_NEXT = 4
MOST_STEP = 2**53

Extent = list[Any]
Series = dict[str, Extent]


def points_of(level: int) -> int:
    """How many points a full row of this level (1, 2, …) stands for."""
    return POINTS_OF_FIRST * int(ROWS_OF_NEXT ** (level - 1))


def highest_level(points: int) -> int:
    """The highest level that a pass of so many points has rows of."""
    level = 1
    while points > points_of(level):
        level += 1
    return level


def step_of(data: dict[str, Any]) -> int | None:
    """The step of a metric or evaluation, if it has a usable one."""
    step = data.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= MOST_STEP else None


def values(kind: str, data: dict[str, Any]) -> Iterable[tuple[str, float | None]]:
    """The series of one event: what is a number, and what was measured but was none that is finite."""
    cut_out = set(data.get("non_finite") or ())
    if kind == "eval":
        named = {f"eval.{name}": value for name, value in (data.get("metrics") or {}).items()}
    else:
        named = {name: data.get(name) for name in NAMED}
        named |= {f"extra.{name}": value for name, value in (data.get("extra") or {}).items()}
    for name, value in named.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, _finite(value)
        elif value is None and name.replace("eval.", "metrics.", 1) in cut_out:
            yield name, None  # a gap in the curve, not a missing point


def _finite(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _join(into: Series, later: Series) -> None:
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
        old[8] += extent[8]


@dataclass(slots=True)
class _Place:
    """Where in the log an event is: its number in the attempt, and its `seq` once a transaction has given it one."""

    number: int
    seq: int = 0


@dataclass(slots=True)
class _Row:
    """A stretch of points."""

    number: int
    """Which of its level: 0, 1, 2, …"""
    first: _Place = field(default_factory=lambda: _Place(0))
    """Shared by all rows that begin with this event."""
    last_number: int = 0
    first_step: int = 0
    last_step: int = 0
    points: int = 0
    rows: int = 0
    series: Series = field(default_factory=dict)

    def add(self, step: int, number: int, found: Iterable[tuple[str, float | None]]) -> None:
        if not self.points:
            self.first_step, self.first = step, _Place(number)
        self.last_step, self.last_number = step, number
        self.points += 1
        for name, value in found:
            extent = self.series.get(name)
            if extent is None:
                self.series[name] = [step, value, step, value, step, value, step, value, 1]
                continue
            if value is not None:
                if extent[3] is None or value < extent[3]:
                    extent[2], extent[3] = step, value
                if extent[5] is None or value > extent[5]:
                    extent[4], extent[5] = step, value
            extent[6], extent[7] = step, value
            extent[8] += 1

    def join(self, later: "_Row") -> None:
        if not self.points:
            self.first_step, self.first = later.first_step, later.first
        self.last_step, self.last_number = later.last_step, later.last_number
        self.points += later.points
        self.rows += 1
        _join(self.series, later.series)

    def with_(self, later: "_Row") -> "_Row":
        both = _Row(
            self.number, self.first, self.last_number, self.first_step, self.last_step, self.points, self.rows,
            {name: list(extent) for name, extent in self.series.items()},
        )  # fmt: skip
        if later.points:
            both.join(later)
        return both


class _Pass:
    """The roll-up of one kind in one pass as it grows."""

    def __init__(self) -> None:
        self._levels = [_Row(0), _Row(0)]
        """The whole pass without the open row of level 1; then, by level, the row that is not full yet."""
        self.last_step = -1

    def add(self, step: int, number: int, found: Iterable[tuple[str, float | None]]) -> list[tuple[int, _Row]]:
        """One more point; answers the rows that are full now, with their levels."""
        self.last_step = step
        self._levels[1].add(step, number, found)
        full = []
        level = 1
        while self._is_full(level):
            row = self._levels[level]
            full.append((level, row))
            if level == 1:
                self._levels[0].join(row)
            if level + 1 == len(self._levels):
                self._levels.append(_Row(0))
            self._levels[level + 1].join(row)
            self._levels[level] = _Row(row.number + 1)
            level += 1
        return full

    def open(self) -> list[tuple[int, _Row]]:
        """The rows that still grow, as they are now."""
        found = []
        below = _Row(0)
        for level in range(1, len(self._levels)):
            below = self._levels[level].with_(below) if level > 1 else self._levels[1]
            if below.points:
                found.append((level, below))
        whole = self._levels[0].with_(self._levels[1])
        return [(0, whole), *found] if whole.points else []

    def _is_full(self, level: int) -> bool:
        row = self._levels[level]
        return row.points == POINTS_OF_FIRST if level == 1 else row.rows == ROWS_OF_NEXT


_UPSERT = text(
    """
    INSERT INTO metric_rollups (run_id, attempt, pass, kind, level, number,
        first_step, last_step, first_seq, last_seq, points, series)
    SELECT :run_id, :attempt, * FROM unnest(
        cast(:pass AS int[]), cast(:kind AS text[]), cast(:level AS int[]), cast(:number AS int[]),
        cast(:first_step AS bigint[]), cast(:last_step AS bigint[]), cast(:first_seq AS bigint[]),
        cast(:last_seq AS bigint[]), cast(:points AS bigint[]), cast(:series AS jsonb[]))
    ON CONFLICT (run_id, attempt, pass, kind, level, number) DO UPDATE SET
        last_step = excluded.last_step, last_seq = excluded.last_seq, points = excluded.points,
        series = excluded.series
    """
)


class Rollups:
    """The roll-ups of one attempt. What a transaction did not get through is written by the next."""

    def __init__(self, run_id: str, attempt: int) -> None:
        self._run_id = run_id
        self._attempt = attempt
        self._pass = 0
        self._kinds = {kind: _Pass() for kind in KINDS}
        self._taken = 0
        self._has_news = False
        self._full: list[tuple[int, str, int, _Row]] = []

    def store(self, connection: Connection, first: int, events: Sequence[NewEvent], stored: Stored | None) -> None:
        """Write what the events number `first`, `first` + 1, … change, in the transaction that has stored them.

        Calling it again with the same events, or with more behind them, counts each of them once.
        """
        for number, event in enumerate(events, first):
            if number > self._taken:
                self._taken = number
                if event.type in KINDS:
                    self._take(number, event)
        # Without news of the log there are none of ours: an earlier transaction, that seemed to fail, has stored both.
        if self._has_news and stored is not None:
            self._write(connection, stored)

    def committed(self) -> None:
        """The transaction of the last `store` is through."""
        self._full.clear()
        self._has_news = False

    def _take(self, number: int, event: NewEvent) -> None:
        data = json.loads(event.data)
        step = step_of(data)
        if step is None:
            return
        mine = self._kinds[event.type]
        if step <= mine.last_step or any(step < other.last_step for other in self._kinds.values()):
            self._full += self._open_rows()
            self._pass += 1
            self._kinds = {kind: _Pass() for kind in KINDS}
            mine = self._kinds[event.type]
        found = ((_storable(name), value) for name, value in values(event.type, data))
        self._full += [(self._pass, event.type, level, row) for level, row in mine.add(step, number, found)]
        self._has_news = True

    def _open_rows(self) -> list[tuple[int, str, int, _Row]]:
        return [(self._pass, kind, level, row) for kind, grows in self._kinds.items() for level, row in grows.open()]

    def _write(self, connection: Connection, stored: Stored) -> None:
        # What lies wholly before `stored` was written together with its events.
        rows = [row for row in (*self._full, *self._open_rows()) if row[3].last_number > stored.number_before]
        if not rows:
            return
        for *_, row in rows:
            if row.first.number > stored.number_before:
                row.first.seq = stored.seq_of(row.first.number)
        connection.execute(
            _UPSERT,
            {
                "run_id": self._run_id,
                "attempt": self._attempt,
                "pass": [row[0] for row in rows],
                "kind": [row[1] for row in rows],
                "level": [row[2] for row in rows],
                "number": [row[3].number for row in rows],
                "first_step": [row[3].first_step for row in rows],
                "last_step": [row[3].last_step for row in rows],
                "first_seq": [row[3].first.seq for row in rows],
                "last_seq": [stored.seq_of(row[3].last_number) for row in rows],
                "points": [row[3].points for row in rows],
                "series": [json.dumps(row[3].series, separators=(",", ":")) for row in rows],
            },
        )


def _storable(name: str) -> str:
    """JSONB takes neither NUL nor half a surrogate pair."""
    return name if name.isascii() and "\0" not in name else name.replace("\0", "�").encode(errors="replace").decode()
