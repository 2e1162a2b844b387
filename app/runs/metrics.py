"""The curves of a run, read from its events."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Text, cast, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.events.models import RunEvent
from app.runs.schemas import Series, TrainingMetrics

events: Any = RunEvent.__table__

_NAMED = ("epoch", "loss", "learning_rate", "grad_norm", "gpu_memory_mb", "samples_per_second")
_FIELDS = {"step", *_NAMED, "extra"}


async def recent(session: AsyncSession, run_id: str, most: int) -> list[TrainingMetrics]:
    """The newest points in order of steps, without those that a later attempt has trained again."""
    query = (
        select(cast(RunEvent.data, Text))
        .where(RunEvent.run_id == run_id, RunEvent.type == "metric")
        .order_by(RunEvent.seq.desc())
        .limit(most * 2)
    )
    kept: list[TrainingMetrics] = []
    for text in (await session.scalars(query)).all():
        data = json.loads(text)
        if len(kept) < most and (not kept or data["step"] < kept[-1].step):
            kept.append(TrainingMetrics(**{name: data[name] for name in _FIELDS & data.keys()}))
    return kept[::-1]


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
    rows = (await session.execute(_newest_pass(run_id, from_step, to_step))).all()
    # Some 100,000 points take a second to parse, in which the other requests go on.
    return await asyncio.to_thread(_series, [tuple(row) for row in rows], names, max_points)


def _newest_pass(run_id: str, from_step: int, to_step: int | None) -> Any:
    """Rows of type, step, data: a point goes when a later event of its type has the same step or an earlier one,
    or a later event of the other type an earlier one."""
    step = cast(events.c.data["step"].astext, BigInteger)
    later = (None, -1)  # rows before this one in descending order of seq, without itself
    points = (
        select(
            RunEvent.seq,
            RunEvent.type,
            step.label("step"),
            cast(RunEvent.data, Text).label("data"),
            func.min(step)
            .over(partition_by=RunEvent.type, order_by=RunEvent.seq.desc(), rows=later)
            .label("next_of_type"),
            func.min(step).over(order_by=RunEvent.seq.desc(), rows=later).label("next_of_any"),
        )
        .where(RunEvent.run_id == run_id, RunEvent.type.in_(("metric", "eval")))
        .cte("points")
    )
    row = points.c
    kept: list[ColumnElement[bool]] = [
        or_(row.next_of_type.is_(None), row.step < row.next_of_type),
        or_(row.next_of_any.is_(None), row.step <= row.next_of_any),
        row.step >= literal(from_step),
    ]
    if to_step is not None:
        kept.append(row.step <= literal(to_step))
    return select(row.type, row.step, row.data).where(*kept).order_by(row.seq)


def _series(rows: Iterable[tuple[str, int, str]], names: Sequence[str] | None, max_points: int) -> dict[str, Series]:
    points: dict[str, tuple[list[int], list[float | None]]] = {name: ([], []) for name in names or ()}
    for kind, step, text in rows:
        for name, value in _values(kind, json.loads(text)):
            if names is None or name in points:
                steps, values = points.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return {name: _thinned(steps, values, max_points) for name, (steps, values) in points.items()}


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
