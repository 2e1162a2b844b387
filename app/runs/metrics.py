"""The curves of a run, read from its events."""

import asyncio
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import BindParameter, Text, bindparam, cast, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.events.models import RunEvent
from app.runs.schemas import Series, TrainingMetrics

_NAMED = ("epoch", "loss", "learning_rate", "grad_norm", "gpu_memory_mb", "samples_per_second")
_CHUNK = 5000
READS_AT_A_TIME = 2
"""Curves that one process reads at once: each may take a connection and a core for a second."""
_FIELDS = {"step", *_NAMED, "extra"}


async def recent(session: AsyncSession, run_id: str, most: int) -> list[TrainingMetrics]:
    """The newest points in order of steps, without those that were trained again later."""
    query = _newest_first(run_id, ("metric",)).limit(most * 2)
    newest = _NewestPass()
    kept = []
    for kind, text in (await session.execute(query)).all():
        data = json.loads(text)
        if newest.has(kind, data["step"]):
            kept.append(TrainingMetrics(**{name: data[name] for name in _FIELDS & data.keys()}))
    return kept[:most][::-1]


async def curves(
    session: AsyncSession,
    run_id: str,
    names: Sequence[str] | None,
    from_step: int,
    to_step: int | None,
    max_points: int,
) -> dict[str, Series]:
    """Every series (or those named), each thinned to `max_points` with its extremes kept.

    `extra.<name>` is what a metric carries in its `extra`, `eval.<name>` the result of an evaluation. Of steps that
    were trained twice, after a loss or a rewind, the newest pass counts.
    """
    found = _Curves(names, from_step, to_step)
    rows = await session.stream(_newest_first(run_id, ("metric", "eval")).execution_options(yield_per=_CHUNK))
    async for chunk in rows.partitions():
        # In a thread: 100,000 points take a second to parse, in which the other requests go on.
        if not await asyncio.to_thread(found.add, chunk):
            break
    await rows.close()
    return await asyncio.to_thread(found.thinned, max_points)


def _newest_first(run_id: str, types: tuple[str, ...]) -> Any:
    query = select(RunEvent.type, cast(RunEvent.data, Text))
    # Written out: a plan for any types could not use the partial index of these.
    literal: BindParameter[str] = bindparam("types", types, expanding=True, literal_execute=True)
    return query.where(RunEvent.run_id == run_id, RunEvent.type.in_(literal)).order_by(RunEvent.seq.desc())


class _NewestPass:
    """Tells, read from the newest event to the oldest, which points no later one has replaced.

    A point of a later event replaces those of its own type from its step on, and all others behind it: an evaluation
    and a metric of one step stand side by side.
    """

    def __init__(self) -> None:
        self.first = math.inf
        """The lowest step so far."""
        self._first_of_type: dict[str, int] = {}

    def has(self, kind: str, step: int) -> bool:
        """Whether the next older event still counts."""
        counts = step <= self.first and step < self._first_of_type.get(kind, math.inf)
        self.first = min(self.first, step)
        self._first_of_type[kind] = min(step, self._first_of_type.get(kind, step))
        return counts


class _Curves:
    """Collects series from the newest event to the oldest."""

    def __init__(self, names: Sequence[str] | None, from_step: int, to_step: int | None) -> None:
        self._all = names is None
        self._from, self._to = from_step, math.inf if to_step is None else to_step
        self._points: dict[str, tuple[list[int], list[float | None]]] = {name: ([], []) for name in names or ()}
        self._newest = _NewestPass()

    def add(self, rows: Iterable[Any]) -> bool:
        """Take rows of type and data; false when no older one can matter."""
        for kind, text in rows:
            data = json.loads(text)
            step = data["step"]
            if not self._newest.has(kind, step) or not self._from <= step <= self._to:
                continue
            for name, value in _values(kind, data):
                if self._all or name in self._points:
                    steps, values = self._points.setdefault(name, ([], []))
                    steps.append(step)
                    values.append(value)
        return self._newest.first >= self._from

    def thinned(self, most: int) -> dict[str, Series]:
        """The series in order of steps."""
        return {name: _thinned(steps[::-1], values[::-1], most) for name, (steps, values) in self._points.items()}


def _values(kind: str, data: dict[str, Any]) -> Iterable[tuple[str, float | None]]:
    cut_out = set(data.get("non_finite") or ())
    if kind == "eval":
        named = {f"eval.{name}": value for name, value in (data.get("metrics") or {}).items()}
    else:
        named = {name: data.get(name) for name in _NAMED}
        named |= {f"extra.{name}": value for name, value in (data.get("extra") or {}).items()}
    for name, value in named.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
        elif value is None and name.replace("eval.", "metrics.", 1) in cut_out:
            yield name, None  # it was measured, and was no finite number: a gap in the curve, not a missing point


def _thinned(steps: list[int], values: list[float | None], most: int) -> Series:
    """First, last, and of each stretch between them the lowest and the highest point."""
    finite = [value for value in values if value is not None]
    if len(steps) > most:
        chosen = {0, len(steps) - 1}
        stretches = max(1, (most - 2) // 2)
        inner = len(steps) - 2
        for number in range(stretches):
            stretch = range(1 + inner * number // stretches, 1 + inner * (number + 1) // stretches)
            known = [index for index in stretch if values[index] is not None]
            if known:
                chosen.add(min(known, key=lambda index: _number(values[index])))
                chosen.add(max(known, key=lambda index: _number(values[index])))
        order = sorted(chosen)
        steps, values = [steps[index] for index in order], [values[index] for index in order]
    return Series(steps=steps, values=values, min=min(finite, default=None), max=max(finite, default=None))


def _number(value: float | None) -> float:
    return 0.0 if value is None else value
