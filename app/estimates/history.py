"""How fast and how large runs of this installation were, from their roll-ups and first facts."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.estimates.work import Work
from app.events.models import RunEvent
from app.runs.config import TrainingConfig, TrainingMethod
from app.runs.models import MetricRollup, Pace
from app.runs.prediction import likeness

_LATEST, _LATEST_OF_ALL = 30, 100
_BACKEND = "celery"
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


async def speed(session: AsyncSession, config: TrainingConfig, device: tuple[str, str | None], work: Work) -> Speed:
    """How long so much work takes on a device (kind, name)."""
    same = select(Pace.run_id).where(Pace.likeness == _like(config.method, config.base_model))
    newest = list((await session.scalars(same.order_by(Pace.run_id.desc()).limit(_LATEST))).unique())
    if near := [one.tokens for one in await _measured_on(session, newest, device)]:
        rate = median(near)
        text = f"{len(near)} earlier runs of this model and method trained at {rate:,.0f} tokens a second here"
        return Speed(work.tokens / rate, "history", f"{text} (the median).")
    others = [
        one.operations for one in await _measured_on(session, await _others(session, config), device) if one.operations
    ]
    if others:
        rate = median(others)
        text = f"{len(others)} earlier runs on this kind of device did {rate / 1e12:.3g} TFLOP/s (the median)"
        return Speed(work.training / rate, "comparable", f"{text}, and this one does as many.")
    rate = ASSUMED_SPEED[device[0]]
    where = "GPU" if device[0] == "cuda" else "CPU"
    text = f"No run has trained on this kind of device yet: a {where} is assumed to do {rate / 1e12:g} TFLOP/s."
    if work.writing:
        text += " Completions are written a token at a time, which is slower than that: expect more."
    return Speed((work.training + work.writing) / rate, "assumed", text)


@dataclass(frozen=True)
class _Rate:
    """What a run did a second."""

    tokens: float
    operations: float | None


def _like(method: str, base_model: str) -> str:
    return likeness(_BACKEND, {"method": method, "base_model": base_model})


async def _others(session: AsyncSession, config: TrainingConfig) -> list[str]:
    """The newest runs that have trained; those that write beside it (`rlhf`) go by their like alone."""
    query = select(Pace.run_id, Pace.likeness).order_by(Pace.run_id.desc(), Pace.attempt.desc())
    rows = (await session.execute(query.limit(_LATEST_OF_ALL))).all()
    writes = config.method is TrainingMethod.rlhf
    ours = [one for one in rows if one.likeness.startswith(f"{_BACKEND} ")]
    found = [one.run_id for one in ours if one.likeness.startswith(_like(TrainingMethod.rlhf, "")) == writes]
    return list(dict.fromkeys(found))[:_LATEST]


async def _measured_on(session: AsyncSession, ids: Sequence[str], device: tuple[str, str | None]) -> list[_Rate]:
    """What those of the runs did a second that were on such a device and have told."""
    if not ids:
        return []
    kind, name = device
    facts, speeds = await _facts(session, ids), await _speeds(session, ids)
    rates = []
    for run_id, tokens in speeds.items():
        told = facts.get(run_id, {})
        if told.get("device") != kind or (name and kind == "cuda" and told.get("device_name") != name):
            continue
        each = told.get("flops_per_token_hardware")
        rates.append(_Rate(tokens, tokens * each if isinstance(each, int | float) else None))
    return rates


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
