"""Points of a run, read from all of its events, whichever version wrote them."""

import asyncio
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import BindParameter, Text, bindparam, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.schemas.runs.reads import TrainingMetrics
from app.runs.reading.metrics.rollups import NAMED, series_values, step_of
from app.tables.events import RunEvent

CHUNK = 500
"""Events that are in memory at a time: each may have 128 KiB."""
_RECENT_BYTES = 2**20

Points = dict[str, dict[int, float | None]]
"""Values of each series by step."""


async def read_recent(session: AsyncSession, run_id: str, most: int) -> list[TrainingMetrics]:
    """Return the newest points in step order, without those that were trained again later.

    Returns fewer than `most` if their events have more than a megabyte.
    """
    newest_events = _newest_first(run_id, ("metric",)).limit(most * 2).subquery()
    size = func.sum(func.octet_length(newest_events.c.data)).over(order_by=newest_events.c.seq.desc(), rows=(None, -1))
    sized = select(newest_events, func.coalesce(size, 0).label("bytes_before")).subquery()
    query = select(sized.c.type, sized.c.data).where(sized.c.bytes_before < _RECENT_BYTES).order_by(sized.c.seq.desc())
    newest = _NewestPass()
    points = []
    for kind, text in (await session.execute(query)).all():
        data = json.loads(text)
        step = step_of(data)
        if step is not None and newest.accept_event(kind, step):
            points.append(_build_point(step, data))
    return points[:most][::-1]


async def newest_evaluation(session: AsyncSession, run_id: str) -> dict[str, float | None] | None:
    """Return the metrics of the newest evaluation of a run by name, null where one was not finite; None without any."""
    text = await session.scalar(_newest_first(run_id, ("eval",)).with_only_columns(cast(RunEvent.data, Text)).limit(1))
    if text is None:
        return None
    return {name.removeprefix("eval."): value for name, value in series_values("eval", json.loads(text))}


def _build_point(step: int, data: dict[str, Any]) -> TrainingMetrics:
    """Build a point from the valid fields of an event; other data from a trainer must not make its run unreadable."""
    numbers, extra = dict(series_values("metric", data)), data.get("extra")
    named = {name: numbers.get(name) for name in NAMED}
    return TrainingMetrics(step=step, **named, extra=extra if isinstance(extra, dict) else {})


async def read_points(
    session: AsyncSession, run_id: str, names: Sequence[str] | None, from_step: int, to_step: int
) -> Points:
    """Return all valid points of every series, or of those in `names`; reads every event of the run."""
    collector = _Counting(names, from_step, to_step)
    rows = await session.stream(_newest_first(run_id, ("metric", "eval")).execution_options(yield_per=CHUNK))
    async for chunk in rows.partitions():
        # In a thread: 100,000 points take a second to parse, which must not block other requests.
        if not await asyncio.to_thread(collector.add_rows, chunk):
            break
    await rows.close()
    return collector.points


def _newest_first(run_id: str, types: tuple[str, ...]) -> Any:
    query = select(RunEvent.type, cast(RunEvent.data, Text).label("data"), RunEvent.seq)
    # As literals: a generic plan could not use the partial index of these types.
    literal: BindParameter[str] = bindparam("types", types, expanding=True, literal_execute=True)
    return query.where(RunEvent.run_id == run_id, RunEvent.type.in_(literal)).order_by(RunEvent.seq.desc())


class _NewestPass:
    """Finds the points that no later one has replaced, reading events from newest to oldest.

    A point of a later event replaces those of its own type from its step on, and those of other types after its
    step: an evaluation and a metric of one step are both valid.
    """

    def __init__(self) -> None:
        self.first = math.inf
        """Lowest step so far."""
        self._first_of_type: dict[str, int] = {}

    def accept_event(self, kind: str, step: int) -> bool:
        """Return True if the next older event is still valid."""
        counts = step <= self.first and step < self._first_of_type.get(kind, math.inf)
        self.first = min(self.first, step)
        self._first_of_type[kind] = min(step, self._first_of_type.get(kind, step))
        return counts


class _Counting:
    """Collects valid points from the newest event to the oldest."""

    def __init__(self, names: Sequence[str] | None, from_step: int, to_step: int) -> None:
        self.points: Points = {name: {} for name in names or ()}
        self._all = names is None
        self._from, self._to = from_step, to_step
        self._newest = _NewestPass()

    def add_rows(self, rows: Iterable[Any]) -> bool:
        """Add rows of type and data; return False if no older row can matter."""
        for kind, text, _ in rows:
            data = json.loads(text)
            step = step_of(data)
            if step is None or not self._newest.accept_event(kind, step) or not self._from <= step <= self._to:
                continue
            for name, value in series_values(kind, data):
                if self._all or name in self.points:
                    self.points.setdefault(name, {})[step] = value
        return self._newest.first >= self._from
