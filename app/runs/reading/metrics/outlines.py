"""Outlines of the curves of many runs, for tables: a few points of each, in two queries for all of them."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from anneal.contracts.methods import METHODS
from app.runs.reading.metrics.curves import _valid_stretches
from app.runs.reading.metrics.rollups import VALUES, highest_level, points_of

MOST_POINTS = 32
_HIGHEST_ROUNDED = 1e308
"""Values beyond may round to infinity; a trainer may report any number."""
_SPEED = "extra.tokens_per_second"
_REWARD = "extra.reward"
_REWARDED = {name for name, method in METHODS.items() if method.higher_is_better}
"""Methods whose progress shows in the reward; of the others, in the loss."""
_FIRST_STEP, _FIRST, _LOW_STEP, _LOW, _HIGH_STEP, _HIGH, _LAST_STEP, _LAST = range(VALUES)

_PASSES = text(
    """
    SELECT run_id, attempt, segment, kind, first_step, last_step, points, cast(series -> :speed AS text) AS speed
    FROM metric_rollups WHERE run_id = ANY(:ids) AND level = 0 AND kind = 'metric' ORDER BY run_id, attempt, segment
    """
)
_PIECES = text(
    """
    SELECT wanted.place, cast(row.series -> wanted.name AS text) AS extent
    FROM unnest(
        cast(:run_ids AS text[]), cast(:attempts AS int[]), cast(:segments AS int[]), cast(:levels AS int[]),
        cast(:lows AS bigint[]), cast(:highs AS bigint[]), cast(:series AS text[])
    ) WITH ORDINALITY AS wanted(run_id, attempt, segment, level, low, high, name, place)
    CROSS JOIN LATERAL (
        SELECT series, number FROM metric_rollups
        WHERE run_id = wanted.run_id AND attempt = wanted.attempt AND segment = wanted.segment AND kind = 'metric'
            AND level = wanted.level AND first_step <= wanted.high AND last_step >= wanted.low
    ) AS row ORDER BY wanted.place, row.number
    """
)


# A row of the lowest level covers 16 points, too many for a short curve.
_SHORT = 4 * MOST_POINTS
_EVENTS = text(
    """
    SELECT run_id, attempt, cast(data ->> 'step' AS bigint) AS step, cast(measure.value ->> 0 AS float) AS value
    FROM run_events CROSS JOIN LATERAL (
        SELECT json_build_array(
            CASE WHEN run_id = ANY(:rewarded) THEN data #> '{extra,reward}' ELSE data -> 'loss' END
        ) AS value
    ) AS measure
    WHERE run_id = ANY(:ids) AND type = 'metric' AND json_typeof(data -> 'step') = 'number'
        AND json_typeof(measure.value -> 0) IN ('number', 'null') ORDER BY run_id, seq
    """
)


@dataclass(frozen=True)
class Outline:
    """Losses or rewards of a run from its first step to its newest, at most `MOST_POINTS`, and its speed."""

    values: list[float | None]
    """Null for a value that was not finite; three significant digits, which a small curve shows."""
    tokens_per_second: int | None
    is_of_rewards: bool


async def read_outlines(connection: AsyncConnection, methods: Mapping[str, str]) -> dict[str, Outline]:
    """Return the outlines of those of the runs that have metrics. Of steps trained twice, the newest pass counts.

    `methods` are by run id.
    """
    run_ids, rewarded = list(methods), {run_id for run_id, method in methods.items() if method in _REWARDED}
    segments: dict[str, list[Any]] = {}
    for row in (await connection.execute(_PASSES, {"ids": run_ids, "speed": _SPEED})).all():
        segments.setdefault(row.run_id, []).append(row)
    pieces: list[tuple[str, int, int, int, int, int]] = []
    short: dict[str, list[Any]] = {}
    for run_id, rows in segments.items():
        stretches = _valid_stretches(rows)
        if sum(row.points for row in rows) <= _SHORT:
            short[run_id] = stretches
            continue
        level = _level_of_points(sum(stretch.about for stretch in stretches))
        for stretch in stretches:
            place = (run_id, stretch.row.attempt, stretch.row.segment)
            pieces.append((*place, min(level, highest_level(stretch.row.points)), stretch.low, stretch.high))
    points = await _of_events(connection, short, rewarded)
    names = ("run_ids", "attempts", "segments", "levels", "lows", "highs")
    columns = {name: [one[place] for one in pieces] for place, name in enumerate(names)}
    series = [_REWARD if one[0] in rewarded else "loss" for one in pieces]
    for place, extent in (await connection.execute(_PIECES, {**columns, "series": series})).all() if pieces else ():
        if extent is not None:
            run_id, *_, low, high = pieces[place - 1]
            points.setdefault(run_id, {}).update(_extent_points(json.loads(extent), low, high))
    return {
        run_id: Outline(_thin_values(points.get(run_id, {})), _last_speed(rows[-1].speed), run_id in rewarded)
        for run_id, rows in segments.items()
    }


async def _of_events(
    connection: AsyncConnection, short: dict[str, list[Any]], rewarded: Iterable[str]
) -> dict[str, dict[int, float | None]]:
    """Return the points of runs with few of them, by step, from their events."""
    points: dict[str, dict[int, float | None]] = {}
    if not short:
        return points
    rows = await connection.execute(_EVENTS, {"ids": list(short), "rewarded": list(rewarded)})
    for run_id, attempt, step, value in rows.all():
        if any(one.row.attempt == attempt and one.low <= step <= one.high for one in short[run_id]):
            points.setdefault(run_id, {})[step] = value
    return points


def _level_of_points(points: int) -> int:
    """Return the lowest level with at most `MOST_POINTS` rows for this many points."""
    level = 1
    while points > points_of(level) * MOST_POINTS:
        level += 1
    return level


def _extent_points(extent: list[Any], low: int, high: int) -> Iterable[tuple[int, float | None]]:
    ends = [(extent[place], extent[place + 1]) for place in (_FIRST_STEP, _LOW_STEP, _HIGH_STEP, _LAST_STEP)]
    return [(step, value) for step, value in ends if step is not None and low <= step <= high]


def _thin_values(points: dict[int, float | None]) -> list[float | None]:
    values = [points[step] for step in sorted(points)]
    if len(values) > MOST_POINTS:
        last = len(values) - 1
        values = [values[round(index * last / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]
    return [None if value is None else _round_value(value) for value in values]


def _round_value(value: float) -> float:
    """Round to three significant digits."""
    if value == 0 or abs(value) > _HIGHEST_ROUNDED:
        return value
    return round(value, 2 - math.floor(math.log10(abs(value))))


def _last_speed(extent: str | None) -> int | None:
    last = json.loads(extent)[_LAST] if extent else None
    return None if last is None else round(last)
