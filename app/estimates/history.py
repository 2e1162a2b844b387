"""How fast and how large runs of this installation were, from their roll-ups and first facts."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.events.models import RunEvent
from app.runs.config import TrainingConfig
from app.runs.models import IS_NO_PROBE, MetricRollup, Run

_LATEST = 30
_EARLY = 1000
"""The facts of a run are among so many of its first events, unless it wrote very many lines before."""
_MAX, _LAST = 5, 7
"""Places in an extent of a roll-up."""
_SPEED = "extra.tokens_per_second"
_RESERVED = "extra.gpu_memory_reserved_mb"
_MEMORY = ("gpu_memory_mb", "extra.host_memory_peak_mb")
ASSUMED_SPEED = {"cuda": 1e14, "cpu": 3e10}
"""Operations a second, while no run has shown any."""


@dataclass(frozen=True)
class Speed:
    """Seconds of a run, and where they come from."""

    seconds: float
    source: Literal["history", "comparable", "assumed"]
    sentence: str


async def speed(
    session: AsyncSession, config: TrainingConfig, device: tuple[str, str | None], tokens: int, operations: float
) -> Speed:
    """How long `tokens` take on a device (kind, name), which are so many operations in all."""
    kind, name = device
    runs = select(Run.id, Run.config).where(Run.backend == "celery", Run.attempt > 0, IS_NO_PROBE)
    latest = (await session.execute(runs.order_by(Run.id.desc()).limit(_LATEST))).all()
    facts = await _facts(session, [run.id for run in latest])
    speeds = await _speeds(session, [run.id for run in latest])
    near, others = [], []
    for run in latest:
        told, found = facts.get(run.id, {}), speeds.get(run.id)
        if found is None or told.get("device") != kind or (name and kind == "cuda" and told.get("device_name") != name):
            continue
        same = run.config.get("base_model") == config.base_model and run.config.get("method") == config.method
        if same:
            near.append(found)
        if isinstance(each := told.get("flops_per_token_hardware"), int | float):
            others.append(found * each)
    if near:
        rate = median(near)
        text = f"{len(near)} earlier runs of this model and method trained at {rate:,.0f} tokens a second here"
        return Speed(tokens / rate, "history", f"{text} (the median).")
    if others:
        rate = median(others)
        text = f"{len(others)} earlier runs on this kind of device did {rate / 1e12:.3g} TFLOP/s (the median)"
        return Speed(operations / rate, "comparable", f"{text}, and this one does as many.")
    rate = ASSUMED_SPEED[kind]
    where = "GPU" if kind == "cuda" else "CPU"
    text = f"No run has trained on this kind of device yet: a {where} is assumed to do {rate / 1e12:g} TFLOP/s."
    return Speed(operations / rate, "assumed", text)


async def measured(session: AsyncSession, run_id: str) -> tuple[float | None, float | None, float | None]:
    """Highest memory and highest reserved memory in MiB and newest tokens a second of a run, over all its attempts."""
    rows = (await session.execute(_whole([run_id]))).all()
    return _highest(rows, *_MEMORY), _highest(rows, _RESERVED), (_newest(rows) if rows else None)


async def facts_of(session: AsyncSession, run_id: str) -> dict[str, Any]:
    """The first facts of a run, of its newest attempt; empty while it has told none."""
    return (await _facts(session, [run_id])).get(run_id, {})


def _highest(rows: Sequence[Any], *names: str) -> float | None:
    peaks = [row.series[name][_MAX] for row in rows for name in names if name in row.series]
    return max((peak for peak in peaks if peak is not None), default=None)


def _whole(ids: Sequence[str]) -> Any:
    """The roll-ups over everything of runs' metrics, oldest first."""
    table = MetricRollup
    query = select(table.run_id, table.series).where(
        table.run_id.in_(ids), table.kind == "metric", table.level == 0
    )  # fmt: skip
    return query.order_by(table.run_id, table.attempt, table.pass_)


def _newest(rows: Sequence[Any]) -> float | None:
    found = [row.series[_SPEED][_LAST] for row in rows if _SPEED in row.series]
    return found[-1] if found else None


async def _speeds(session: AsyncSession, ids: Sequence[str]) -> dict[str, float]:
    found = {row.run_id: _newest([row]) for row in (await session.execute(_whole(ids))).all()}
    return {run_id: value for run_id, value in found.items() if value}


async def _facts(session: AsyncSession, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    query = select(RunEvent.run_id, RunEvent.data["facts"].label("facts")).where(
        RunEvent.run_id.in_(ids), RunEvent.type == "config", RunEvent.seq <= _EARLY
    )
    return {row.run_id: row.facts or {} for row in (await session.execute(query.order_by(RunEvent.seq))).all()}
