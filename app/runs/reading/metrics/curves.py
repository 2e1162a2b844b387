"""Curves of a run, read from its roll-ups: as fast for a million points as for ten thousand, with every extreme."""

import asyncio
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.schemas.runs.curves import Series
from app.api.errors import not_found
from app.runs.events.log import MEASURED
from app.runs.reading.metrics.points import CHUNK, Points, read_points
from app.runs.reading.metrics.rollups import MOST_STEP, VALUES, highest_level, points_of, series_values, step_of

READS_AT_A_TIME = 2
"""Curves that one process reads concurrently: each may take a connection and a core for a second."""
_FEW = 5000
"""Up to this many points, thinning is faster than handing it to a thread."""
_NEVER = 2**62
_LEAST_POINTS = 4
_MOST_VALUES = 500_000
"""Points of all series of an answer: each takes a hundred bytes on its way."""

# One range at a time: a single condition over several would read the whole index.
_EVENTS = """
    FROM unnest(cast(:lows AS bigint[]), cast(:highs AS bigint[])) AS stretch(low, high)
    CROSS JOIN LATERAL (
        SELECT type, attempt, data FROM run_events
        WHERE run_id = :run_id AND seq BETWEEN stretch.low AND stretch.high AND type IN ('metric', 'eval')
        {}
    ) AS event
"""
_POINTS = text("SELECT type, attempt, cast(data AS text) " + _EVENTS.format("ORDER BY seq"))
_PASSES = text(
    """
    SELECT run.first_seq AS oldest_seq, row.attempt, segment, kind, first_step, last_step, row.first_seq,
        last_seq, points, (SELECT count(*) FROM json_object_keys(series)) AS names
    FROM runs AS run LEFT JOIN metric_rollups AS row ON row.run_id = run.id AND level = 0
    WHERE run.id = :run_id ORDER BY row.attempt, segment
    """
)
_PIECES = """
    SELECT first_step, last_step, first_seq, last_seq, points, {} AS extents FROM metric_rollups
    WHERE run_id = :run_id AND attempt = :attempt AND segment = :segment AND kind = :kind AND level = :level
        AND last_step >= :low AND first_step <= :high
    ORDER BY number
"""
_OF_NAMES = """
    cast((SELECT json_object_agg(name, series -> name) FROM unnest(cast(:names AS text[])) AS name
        WHERE series -> name IS NOT NULL) AS text)
"""
# For one series, the usual request, in half the time; null if the row lacks the series.
_OF_NAME = "'{' || cast(to_json(cast(:name AS text)) AS text) || ':' || cast(series -> :name AS text) || '}'"
_PIECES_OF_ALL, _PIECES_OF_NAMES = text(_PIECES.format("cast(series AS text)")), text(_PIECES.format(_OF_NAMES))
_PIECES_OF_NAME = text(_PIECES.format(_OF_NAME))
_ANY_POINT = text("SELECT EXISTS (SELECT " + _EVENTS.format("LIMIT 1") + ")")


async def read_curves(
    session: AsyncSession,
    run_id: str,
    names: Sequence[str] | None,
    from_step: int,
    to_step: int | None,
    max_points: int,
) -> dict[str, Series]:
    """Return every series (or those in `names`), each thinned to `max_points` with its extremes kept.

    With very many series, each has fewer points.

    `extra.<name>` is a value from a metric's `extra`, `eval.<name>` a result of an evaluation. Of steps that were
    trained twice, after a lost worker or a rewind, the newest segment counts. The session must be a snapshot: the log
    and its roll-ups must be consistent with each other while the run continues.
    """
    rows = (await session.execute(_PASSES, {"run_id": run_id})).all()
    if not rows:
        raise not_found("run", run_id)
    last = MOST_STEP if to_step is None else to_step
    first_seq = rows[0].oldest_seq
    # The segments in training order, with a row for each kind.
    whole = [row for row in rows if row.attempt is not None]
    count = len(names) if names is not None else sum(row.names for row in whole)
    max_points = min(max_points, max(_MOST_VALUES // max(count, 1), _LEAST_POINTS))
    is_little = first_seq == 1 and sum(row.points for row in whole) <= max_points
    # Attempts by a worker of an earlier version have no roll-ups.
    if is_little or await _is_any_outside(session, run_id, whole):
        points = await read_points(session, run_id, names, from_step, last)
    else:
        reading = _Reading(session, run_id, first_seq, names)
        stretches = [stretch for stretch in _valid_stretches(whole) if stretch.narrow_to(from_step, last)]
        for kind in MEASURED:
            await reading.read_points([stretch for stretch in stretches if stretch.row.kind == kind], max_points)
        points = reading.points
    if sum(map(len, points.values())) <= _FEW:
        return _thin_all(points, max_points)
    return await asyncio.to_thread(_thin_all, points, max_points)


def _thin_all(points: Points, most: int) -> dict[str, Series]:
    return {name: _thin_series(found, most) for name, found in points.items()}


async def _is_any_outside(session: AsyncSession, run_id: str, whole: Sequence[Any]) -> bool:
    """Return True if there are points that no roll-up covers."""
    gaps, reached = [], 0
    for first, last in sorted((row.first_seq, row.last_seq) for row in whole):
        if first > reached + 1:
            gaps.append((reached + 1, first - 1))
        reached = max(reached, last)
    gaps.append((reached + 1, _NEVER))
    return bool(await session.scalar(_ANY_POINT, _range_parameters(run_id, gaps)))


def _range_parameters(run_id: str, ranges: Iterable[tuple[int, int]]) -> dict[str, Any]:
    pairs = list(ranges)
    return {"run_id": run_id, "lows": [low for low, _ in pairs], "highs": [high for _, high in pairs]}


@dataclass
class _Stretch:
    """Valid points of one kind in one segment: the steps from `low` to `high`."""

    row: Any
    low: int
    high: int

    def narrow_to(self, low: int, high: int) -> bool:
        """Restrict the steps to this range; return True if any are left."""
        self.low, self.high = max(self.low, low), min(self.high, high)
        return self.low <= self.high

    @property
    def about(self) -> int:
        """Approximate number of points, as if they were evenly spaced."""
        share = (self.high - self.low + 1) / (self.row.last_step - self.row.first_step + 1)
        return math.ceil(float(self.row.points * share))

    def contains_row(self, row: Any) -> bool:
        """Return True if a whole row is valid."""
        return bool(self.low <= row.first_step and row.last_step <= self.high)

    def contained_rows(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Return the rows, given in order, that are valid as a whole."""
        if rows and self.low <= rows[0].first_step and rows[-1].last_step <= self.high:
            return rows
        return [row for row in rows if self.contains_row(row)]


def _valid_stretches(whole: Sequence[Any]) -> list[_Stretch]:
    """Return the steps of each segment that no later segment has trained again.

    A later point replaces those of its own kind from its step on, and those of other kinds after its step: an
    evaluation and a metric of one step are both valid.
    """
    segments: dict[tuple[int, int], list[Any]] = {}
    for row in whole:
        segments.setdefault((row.attempt, row.segment), []).append(row)
    stretches = []
    first = MOST_STEP
    first_of_kind = dict.fromkeys(MEASURED, MOST_STEP + 1)
    for key in sorted(segments, reverse=True):
        for row in segments[key]:
            high = min(first, first_of_kind[row.kind] - 1, row.last_step)
            if row.first_step <= high:
                stretches.append(_Stretch(row, row.first_step, high))
        for row in segments[key]:
            first = min(first, row.first_step)
            first_of_kind[row.kind] = min(first_of_kind[row.kind], row.first_step)
    return stretches[::-1]


def _is_in(stretch: _Stretch, step: int) -> bool:
    return stretch.low <= step <= stretch.high


class _Reading:
    """Collects the points of curves."""

    def __init__(self, session: AsyncSession, run_id: str, first_seq: int, names: Sequence[str] | None) -> None:
        self.points: Points = {name: {} for name in names or ()}
        self._session = session
        self._run_id = run_id
        self._first_seq = first_seq
        self._names = names
        self._ends: dict[str, tuple[int, float | None, int, float | None]] = {}
        """First and last step of each series, with their values."""

    async def read_points(self, stretches: list[_Stretch], max_points: int) -> None:
        """Read the points of one kind, or only the lowest and the highest of each row if there are too many."""
        about = sum(stretch.about for stretch in stretches)
        level = 1
        while points_of(level) * max_points < 2 * about:
            level += 1
        while True:
            pieces = [(stretch, await self._overlapping_rows(stretch, level)) for stretch in stretches]
            is_little = (
                sum(row.points for stretch, rows in pieces for row in stretch.contained_rows(rows)) <= max_points
            )
            if level == 1 or not is_little:
                break
            level -= 1  # the points are denser elsewhere
        for stretch, rows in pieces:
            if is_little and self._has_events(rows):
                await self._take_events(stretch, rows)
            else:
                await self._take_pieces(stretch, rows, level)
        for name, (first, first_value, last, last_value) in self._ends.items():
            self.points[name].update({first: first_value, last: last_value})

    async def _overlapping_rows(self, stretch: _Stretch, level: int) -> list[Any]:
        """Return the rows of a level, or of the highest existing level below it, that overlap a stretch."""
        level = min(level, highest_level(stretch.row.points))
        return await self._select_rows(stretch, level, stretch.low, stretch.high)

    async def _select_rows(self, stretch: _Stretch, level: int, low: int, high: int) -> list[Any]:
        row = stretch.row
        place = {
            "run_id": self._run_id,
            "attempt": row.attempt,
            "segment": row.segment,
            "kind": row.kind,
            "level": level,
        }
        parameters: dict[str, Any] = {**place, "low": low, "high": high}
        if self._names is None:
            rows = await self._session.execute(_PIECES_OF_ALL, parameters)
        elif len(self._names) == 1:
            rows = await self._session.execute(_PIECES_OF_NAME, {**parameters, "name": self._names[0]})
        else:
            rows = await self._session.execute(_PIECES_OF_NAMES, {**parameters, "names": self._names})
        return list(rows.all())

    def _has_events(self, rows: Sequence[Any]) -> bool:
        """Return True if retention has kept the events of these rows."""
        return bool(rows) and rows[0].first_seq >= self._first_seq

    async def _take_pieces(self, stretch: _Stretch, rows: list[Any], level: int) -> None:
        whole = stretch.contained_rows(rows)
        self._take_whole(whole)
        for row in [] if whole is rows else [row for row in rows if not stretch.contains_row(row)]:
            low, high = max(stretch.low, row.first_step), min(stretch.high, row.last_step)
            fine = rows if level == 1 else await self._select_rows(stretch, 1, low, high)
            torn = [
                one for one in fine if not stretch.contains_row(one) and one.last_step >= low and one.first_step <= high
            ]
            if self._has_events(torn):
                await self._take_events(_Stretch(stretch.row, low, high), torn)
            else:
                for piece in torn:
                    self._take_extents(stretch, piece)
            if level > 1:
                for piece in fine:
                    if piece not in torn:
                        self._take_extents(stretch, piece)

    def _take_whole(self, rows: Iterable[Any]) -> None:
        """Add rows that are valid as a whole."""
        # In one document: parsing each row separately takes three times as long.
        texts = [row.extents for row in rows if row.extents]
        for series in json.loads(f"[{','.join(texts)}]"):
            for name, extent in series.items():
                first, at_first, low, lowest, high, highest, last, at_last = extent[:VALUES]
                points = self.points.setdefault(name, {})
                if lowest is None:
                    points[first] = at_first  # of a row with only gaps, one is shown
                else:
                    points[low], points[high] = lowest, highest
                self._extend_ends(name, first, at_first, last, at_last)

    def _take_extents(self, stretch: _Stretch, row: Any) -> None:
        """Add the valid part of a row."""
        for name, extent in json.loads(row.extents or "{}").items():
            points = self.points.setdefault(name, {})
            pairs = zip(extent[:VALUES:2], extent[1:VALUES:2], strict=True)
            valid_points = {step: value for step, value in pairs if _is_in(stretch, step)}
            if not valid_points:
                continue
            for place in (2, 4) if extent[3] is not None else (0,):
                if extent[place] in valid_points:
                    points[extent[place]] = extent[place + 1]
            first, last = min(valid_points), max(valid_points)
            self._extend_ends(name, first, valid_points[first], last, valid_points[last])

    def _extend_ends(self, name: str, first: int, at_first: float | None, last: int, at_last: float | None) -> None:
        ends = self._ends.get(name)
        if ends is None:
            self._ends[name] = (first, at_first, last, at_last)
            return
        if first < ends[0]:
            ends = self._ends[name] = (first, at_first, *ends[2:])
        if last > ends[2]:
            self._ends[name] = (*ends[:2], last, at_last)

    async def _take_events(self, stretch: _Stretch, rows: Sequence[Any]) -> None:
        ranges = _range_parameters(self._run_id, ((row.first_seq, row.last_seq) for row in rows))
        events = await self._session.stream(_POINTS.execution_options(yield_per=CHUNK), ranges)
        async for chunk in events.partitions():
            await asyncio.to_thread(self._add_events, chunk, stretch)

    def _add_events(self, events: Iterable[Any], stretch: _Stretch) -> None:
        for kind, attempt, data in events:
            if kind != stretch.row.kind or attempt != stretch.row.attempt:
                continue
            point = json.loads(data)
            step = step_of(point)
            if step is None or not stretch.low <= step <= stretch.high:
                continue
            for name, value in series_values(kind, point):
                if self._names is None or name in self.points:
                    self.points.setdefault(name, {})[step] = value


def _thin_series(points: dict[int, float | None], most: int) -> Series:
    """Thin a series to its first and last point, and the lowest and highest of each section between them."""
    steps = sorted(points)
    values = [points[step] for step in steps]
    finite = [value for value in values if value is not None]
    if len(steps) > most:
        chosen = {0, len(steps) - 1}
        stretches = max(1, (most - 2) // 2)
        inner = len(steps) - 2
        for number in range(stretches):
            stretch = range(1 + inner * number // stretches, 1 + inner * (number + 1) // stretches)
            known = [(value, index) for index in stretch if (value := values[index]) is not None]
            if known:
                chosen.add(min(known)[1])
                chosen.add(max(known)[1])
        order = sorted(chosen)
        steps, values = [steps[index] for index in order], [values[index] for index in order]
    return Series(steps=steps, values=values, min=min(finite, default=None), max=max(finite, default=None))
