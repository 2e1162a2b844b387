"""Measured speed and memory of earlier runs of this installation, from metric roll-ups and `config` events."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.attempt.run_facts import RunFacts, read_facts
from anneal.contracts.gpus import REACHED_SHARE, find_gpu
from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator.flops import RunFlops
from app.runs.queue.durations import similarity_key
from app.tables.runs import AttemptTimings, MetricRollup

_LATEST, _LATEST_OF_ALL = 30, 100
_BACKEND = "celery"
_EARLY = 1000
"""Number of first events searched for a run's facts; a run that logs very many lines first exceeds it."""
_MAX, _LAST = 5, 7
"""Indices of the maximum and the last value in a roll-up series."""
_SPEED = "extra.tokens_per_second"
_RESERVED = "extra.gpu_memory_reserved_mb"
_MEMORY = ("gpu_memory_mb", "extra.host_memory_peak_mb")
_PLAUSIBLE_TOKENS = 1e-3, 1e9
"""Least and most tokens per second of a run. A trainer may report any number; other values are not measurements."""
_PLAUSIBLE_OPERATIONS = 1e3, 1e18
"""Least and most operations per second of a device."""
_MOST_MB = 2**31
ASSUMED_SPEED = {"cuda": 1e14, "cpu": 3e10}
"""Operations per second, used until a run has been measured."""
_LEAST_STEP_SECONDS = 0.005
"""Time of the smallest step: its Python code and the launches of its kernels, however few operations it has."""
_SCALES = (
    "Time is assumed to be inversely proportional to the number of devices, whether they divide rows or share "
    "sequences."
)


@dataclass(frozen=True)
class Speed:
    """Duration of a run in seconds, and its source."""

    seconds: float
    source: Literal["history", "comparable", "assumed"]
    sentences: tuple[str, ...]

    def bounded(self, steps: int | None) -> "Speed":
        """Return a duration that the overhead of so many steps allows; measured speeds include it."""
        least = (steps or 0) * _LEAST_STEP_SECONDS
        if self.source != "assumed" or self.seconds >= least:
            return self
        milliseconds = f"{_LEAST_STEP_SECONDS * 1000:g} ms"
        said = f"Steps of so few operations are mostly overhead: each is assumed to take {milliseconds}."
        return Speed(least, self.source, (*self.sentences, said))


async def estimate_speed(
    session: AsyncSession, config: TrainingConfig, device: tuple[str, str | None], devices: int, work: RunFlops
) -> Speed:
    """Estimate the duration of `work` on some devices (kind, name); `config` is the effective configuration.

    Rates are those of each device, so that runs on other numbers of devices count where none had as many.
    """
    same = select(AttemptTimings.run_id).where(
        AttemptTimings.similarity_key == _method_and_model_key(config.method, config.base_model)
    )
    newest = list((await session.scalars(same.order_by(AttemptTimings.run_id.desc()).limit(_LATEST))).unique())
    near = [
        one for one in await _measured_on(session, newest, device) if _is_like(one, config, work.length)
    ]  # fmt: skip
    if near := _of_as_many(near, devices):
        rate = median(one.tokens for one in near)
        said = f"{_earlier_runs(near)} of the same model and method processed {rate:,.0f} tokens per second per"
        return _speed_on_devices(work.tokens / rate, devices, near, "history", f"{said} device here (median).")
    others = [
        one for one in await _measured_on(session, await _comparable_runs(session, config), device) if one.operations
    ]
    if others := _of_as_many(others, devices):
        rate = median(one.operations for one in others)
        said = f"{_earlier_runs(others)} on this kind of device reached {rate / 1e12:.3g} TFLOP/s per device (median)"
        said += "; the same speed is assumed for this run."
        return _speed_on_devices(work.training / rate, devices, others, "comparable", said)
    gpu = find_gpu(device[1]) if device[0] == "cuda" else None
    rate = ASSUMED_SPEED[device[0]] if gpu is None else gpu.training_speed
    where = gpu.name if gpu is not None else "a GPU" if device[0] == "cuda" else "a CPU"
    said = f"No run has trained on this kind of device yet; {where} is assumed to reach {rate / 1e12:.3g} TFLOP/s"
    said += "." if gpu is None else f", {REACHED_SHARE:.0%} of its data sheet."
    if work.writing:
        said += " Completions are generated one token at a time, which is slower, so expect a longer run."
    return _speed_on_devices((work.training + work.writing) / rate, devices, [], "assumed", said)


@dataclass(frozen=True)
class _Rate:
    """Measured throughput of each device of a run, per second."""

    devices: int
    tokens: float
    operations: float
    """0 if not known."""
    length: int | None
    """Mean number of tokens of a sequence."""
    work: "_Work | None"
    """None if the trainer reported no valid configuration."""


class _Work(BaseModel):
    """Fields of an effective configuration that change the work per token."""

    model_config = ConfigDict(strict=True)

    lora_r: int | None
    load_in_4bit: bool
    load_in_8bit: bool
    packing: bool
    max_seq_length: Annotated[int, Field(ge=1)] | None

    @classmethod
    def from_effective(cls, effective: Any) -> "_Work | None":
        """Return the fields of a configuration as the trainer reported it, if they are valid."""
        try:
            return cls.model_validate(effective)
        except ValidationError:
            return None


def _of_as_many(rates: list[_Rate], devices: int) -> list[_Rate]:
    """Return the rates of runs on so many devices; all if there is none."""
    return [one for one in rates if one.devices == devices] or rates


def _speed_on_devices(
    on_one: float, devices: int, measured: list[_Rate], source: Literal["history", "comparable", "assumed"], said: str
) -> Speed:
    """Return the speed on several devices from the seconds on one, and the assumption that this makes."""
    is_scaled = any(one.devices != devices for one in measured) if measured else devices > 1
    return Speed(on_one / devices, source, (said, _SCALES) if is_scaled else (said,))


def _method_and_model_key(method: str, base_model: str) -> str:
    return similarity_key(_BACKEND, {"method": method, "base_model": base_model})


def _is_like(measured: _Rate, config: TrainingConfig, length: int) -> bool:
    """Return True if a run did the same work per token on sequences half to twice as long.

    The run must have the same model and method.
    """
    then = measured.work
    if then is None or (then.lora_r is None) != (config.lora_r is None):
        return False
    if any(getattr(then, name) != getattr(config, name) for name in ("load_in_4bit", "load_in_8bit", "packing")):
        return False
    # Packed sequences are full regardless of the length of the texts in them.
    lengths = (then.max_seq_length, config.max_seq_length) if config.packing else (measured.length, length)
    measured_length, requested_length = lengths
    if measured_length is None or requested_length is None:
        return False
    return 0.5 <= measured_length / requested_length <= 2


async def _comparable_runs(session: AsyncSession, config: TrainingConfig) -> list[str]:
    """Return the newest runs that have trained; runs that generate are compared only with each other."""
    query = select(AttemptTimings.run_id, AttemptTimings.similarity_key).order_by(
        AttemptTimings.run_id.desc(), AttemptTimings.attempt.desc()
    )
    rows = (await session.execute(query.limit(_LATEST_OF_ALL))).all()
    generating = tuple(_method_and_model_key(method.name, "") for method in METHODS.values() if method.generates)
    generates = config.generation is not None
    ours = [one for one in rows if one.similarity_key.startswith(f"{_BACKEND} ")]
    run_ids = [one.run_id for one in ours if one.similarity_key.startswith(generating) == generates]
    return list(dict.fromkeys(run_ids))[:_LATEST]


async def _measured_on(session: AsyncSession, ids: Sequence[str], device: tuple[str, str | None]) -> list[_Rate]:
    """Return the rates of the runs that ran on such a device and reported a speed."""
    if not ids:
        return []
    kind, name = device
    first, speeds = await _first_reports(session, ids), await _read_speeds(session, ids)
    rates = []
    for run_id, tokens in speeds.items():
        if run_id not in first:
            continue
        facts, work, devices = first[run_id]
        if facts.device != kind or (name and kind == "cuda" and facts.device_name != name):
            continue
        operations = tokens * (facts.flops_per_token_hardware or 0.0) / devices
        if not _is_within(operations, _PLAUSIBLE_OPERATIONS):
            operations = 0.0
        rates.append(_Rate(devices, tokens / devices, operations, facts.flops_sequence_length, work))
    return rates


def _is_within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


async def measured_usage(session: AsyncSession, run_id: str) -> tuple[float | None, float | None, float | None]:
    """Return peak memory (MiB), peak reserved memory (MiB) and latest tokens per second over all attempts of a run."""
    rows = (await session.execute(_select_rollups([run_id]))).all()
    return _highest_peak(rows, *_MEMORY), _highest_peak(rows, _RESERVED), (_newest_speed(rows) if rows else None)


def _highest_peak(rows: Sequence[Any], *names: str) -> float | None:
    peaks = [row.series[name][_MAX] for row in rows for name in names if name in row.series]
    return max((peak for peak in peaks if peak is not None and _is_within(peak, (0.0, _MOST_MB))), default=None)


def _select_rollups(ids: Sequence[str]) -> Any:
    """Build the query for the top-level metric roll-ups of runs, oldest first."""
    table = MetricRollup
    query = select(table.run_id, table.series).where(
        table.run_id.in_(ids), table.kind == "metric", table.level == 0
    )  # fmt: skip
    return query.order_by(table.run_id, table.attempt, table.segment)


def _newest_speed(rows: Sequence[Any]) -> float | None:
    speeds = [row.series[_SPEED][_LAST] for row in rows if _SPEED in row.series]
    newest = speeds[-1] if speeds else None
    return newest if newest is not None and _is_within(newest, _PLAUSIBLE_TOKENS) else None


async def _read_speeds(session: AsyncSession, ids: Sequence[str]) -> dict[str, float]:
    speeds = {row.run_id: _newest_speed([row]) for row in (await session.execute(_select_rollups(ids))).all()}
    return {run_id: value for run_id, value in speeds.items() if value}


async def _first_reports(session: AsyncSession, ids: Sequence[str]) -> dict[str, tuple[RunFacts, _Work | None, int]]:
    """Return the first reported facts and effective configuration of each run, and its number of devices."""
    rows = await session.execute(_FIRST, {"ids": list(ids), "early": _EARLY})
    return {
        row.run_id: (read_facts(row.facts), _Work.from_effective(row.effective), row.devices_needed) for row in rows
    }


# No index covers `config` events. The event is among the first of a run, so only those are read.
_FIRST = text("""
    SELECT runs.id AS run_id, runs.devices_needed, first.facts, first.effective
    FROM runs, LATERAL (
        SELECT data -> 'facts' AS facts, data -> 'effective' AS effective FROM run_events
        WHERE run_id = runs.id AND seq <= :early AND type = 'config' ORDER BY seq LIMIT 1
    ) AS first WHERE runs.id = ANY(:ids)
""")


def _earlier_runs(rates: list[_Rate]) -> str:
    return f"{len(rates)} earlier {'run' if len(rates) == 1 else 'runs'}"
