"""Estimates of runs: the model's files, the devices there are, and the formulas put together."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.config import Settings
from app.datasets.models import Dataset
from app.estimates import planner
from app.estimates.activations import Precision
from app.estimates.architecture import Architecture, UnknownArchitecture, read
from app.estimates.history import Speed, measured, speed
from app.estimates.memory import CONTEXT
from app.estimates.models import StoredEstimate
from app.estimates.parameters import CannotTrain, total, trained
from app.estimates.plan import Data, Plan, longest, plan
from app.estimates.schemas import (
    Confidence,
    Cost,
    EstimatedDevice,
    Fit,
    Measured,
    Parameters,
    RunEstimate,
    Unknown,
    stored,
)  # fmt: skip
from app.runs import base_models
from app.runs.config import Machine, TrainingConfig, TrainingMethod, resolve
from app.runs.models import Run
from app.runs.transitions import seconds as interval
from app.storage import Storage
from app.workers.models import Device, Worker
from app.workers.service import FRESH_LEASES

_MOST_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class Subject:
    """What is to be estimated: a run that would be accepted."""

    config: TrainingConfig
    given: list[str]
    backend: str
    data: Data


class _NoConfig(Exception):
    """The model's configuration cannot be read here; its text says why, as a sentence."""


async def estimate(
    session: AsyncSession, settings: Settings, storage: Storage, subject: Subject, *, thorough: bool
) -> RunEstimate:
    """What the run would take; `thorough` looks at earlier runs and for what would fit too.

    Never raises for what cannot be known: that is null, with its reason.
    """
    devices = await _devices(session, settings, subject.backend)
    name = subject.config.base_model
    attempt = None
    if base_models.is_run(name):
        attempt = await session.scalar(select(Run.output_attempt).where(Run.id == name))
    try:
        described = await asyncio.to_thread(_config_json, settings, storage, subject.config, attempt)
        model = read(described)
        trained(model, resolve(subject.config, subject.given, None).config)
    except (_NoConfig, UnknownArchitecture, CannotTrain) as error:
        return _unknown(devices, str(error))
    found, planned, chosen = await asyncio.to_thread(_by_formula, model, subject, devices, thorough)
    if not thorough:
        untold = Unknown(field="seconds", reason="`POST /v1/runs/estimate` alone tells how long a run takes.")
        return found.model_copy(update={"unknown": [untold]})
    held, sequence = chosen.memory.activations, planned.batch.tokens
    operations = (held.operations + held.operations_again) / sequence * planned.tokens
    kind, device_name = found.device.kind, found.device.name
    took = await speed(session, subject.config, (kind, device_name), planned.tokens, operations)
    return found.model_copy(update=_of_time(settings, found, took, operations))


async def data_of(session: AsyncSession, dataset_id: str) -> Data:
    """What is known of a data set that is there."""
    dataset = await session.get_one(Dataset, dataset_id)
    return Data(dataset.rows, dataset.bytes, dataset.token_statistics)


async def store(session: AsyncSession, run_id: str, found: RunEstimate) -> None:
    """Write down what was estimated of a run just made."""
    new = insert(StoredEstimate).values(run_id=run_id, estimate=found.model_dump(mode="json"))
    await session.execute(new.on_conflict_do_nothing())


async def compared(
    session: AsyncSession, run: Run, step_seconds: float | None
) -> tuple[RunEstimate | None, Measured | None]:
    """What was estimated of a run at its creation, and what it has taken so far; null before it has measured any."""
    document = await session.scalar(select(StoredEstimate.estimate).where(StoredEstimate.run_id == run.id))
    peak, reserved, rate = await measured(session, run.id) if run.attempt else (None, None, None)
    real = None
    if peak is not None or rate is not None:
        real = Measured(
            peak_memory_mb=peak, reserved_memory_mb=reserved, tokens_per_second=rate, step_seconds=step_seconds
        )
    return stored(document) if document else None, real


async def _devices(session: AsyncSession, settings: Settings, backend: str) -> list[EstimatedDevice]:
    """The kinds of devices that workers offer now, GPUs and those with most memory first."""
    fresh = func.clock_timestamp() - interval(settings.lease_seconds * FRESH_LEASES)
    query = select(Device.kind, Device.name, Device.memory_mb).distinct().join(Worker, Worker.id == Device.worker_id)
    online = query.where(Worker.state == "online", Worker.heartbeat_at > fresh, Worker.backends.contains([backend]))
    rows = (await session.execute(online)).all()
    found = [EstimatedDevice(kind=row.kind, name=row.name, memory_mb=row.memory_mb) for row in rows]
    return sorted(found, key=lambda one: (one.kind == "cuda", one.memory_mb or 0), reverse=True)


def _config_json(settings: Settings, storage: Storage, config: TrainingConfig, attempt: int | None) -> dict[str, Any]:
    try:
        located = base_models.locate(settings, storage, config.base_model, attempt, config.revision)
    except base_models.BaseModelError as error:
        raise _NoConfig(error.message) from error
    if located["path"] is None:
        return _of_hub(str(located["hub"]), config.revision)
    return _of_folder(Path(located["path"]), (settings.models_folder, storage.root))


def _of_folder(folder: Path, roots: tuple[Path, ...], depth: int = 0) -> dict[str, Any]:
    described = folder / "adapter_config.json"
    if not described.is_file():
        return _read(folder / "config.json")
    base = str(_read(described).get("base_model_name_or_path") or "")
    below = Path(base)
    if below.is_absolute():
        inside = any(below.resolve().is_relative_to(root.resolve()) for root in roots)
        if inside and below.is_dir() and depth < 4:
            return _of_folder(below, roots, depth + 1)
        raise _NoConfig(f"The base of the adapter {folder.name} is not on this machine any more.")
    return _of_hub(base, None)


def _of_hub(name: str, revision: str | None) -> dict[str, Any]:
    from huggingface_hub import try_to_load_from_cache  # it imports much that no other call needs

    cached = None
    if base_models.is_hub_name(name) and ".." not in (revision or ""):
        with suppress(ValueError):  # a name that no repository can have
            cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(cached, str):
        raise _NoConfig(
            f"The configuration of {name[:100]!r} is not on the API's machine, which looks into its models root and "
            "its cache of the hub and asks no network: put the model's folder below ANNEAL_MODELS_ROOT."
        )
    return _read(Path(cached))


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MOST_CONFIG_BYTES:
            raise _NoConfig(f"{file.name} of the model is larger than any configuration.")
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _NoConfig(f"{file.name} of the model cannot be read: {type(error).__name__}.") from error
    if not isinstance(found, dict):
        raise _NoConfig(f"{file.name} of the model is no object.")
    return found


def _by_formula(
    model: Architecture, subject: Subject, devices: list[EstimatedDevice], thorough: bool
) -> tuple[RunEstimate, Plan, planner.Choice]:
    assumed = devices[0] if devices else EstimatedDevice(kind="cuda", name=None, memory_mb=None)
    fits = [_fit(model, subject, device, thorough) for device in devices]
    config, planned, chosen = _on(model, subject, assumed)
    where = "A process with torch" if assumed.kind == "cpu" else "The context of CUDA and its libraries"
    sentences = [
        f"{where} takes {CONTEXT[assumed.kind] // 2**20} MiB before any tensor.",
        "Memory is that of the longest sequences, and the total that of the highest moment of a step.",
        *planned.assumptions,
    ]
    if not devices:
        sentences.insert(0, "No worker of this backend is online: a GPU with bfloat16 is assumed.")
    if config.optim.startswith("paged_"):
        sentences.append(
            "Paged optimizer state counts, though it moves to the host when memory is scarce and is not part of what "
            "torch measures as allocated."
        )
    if config.method is TrainingMethod.rlhf and any(one.type == "model" for one in config.rlhf.rewards):
        sentences.append("Reward models take memory of their own, which is not counted.")
    total_mb = chosen.memory.as_megabytes()
    found = RunEstimate(
        parameters=Parameters(
            total=total(model, reward_head=config.method is TrainingMethod.reward),
            trainable=trained(model, config).count,
        ),
        memory_mb=total_mb,
        device=assumed,
        gradient_checkpointing=chosen.checkpointing,
        steps=planned.steps,
        tokens=planned.tokens,
        flops=None,
        seconds=None,
        cost=None,
        confidence=Confidence(memory="formula", seconds=None),
        fits=fits,
        assumptions=sentences,
        unknown=[],
    )
    return found, planned, chosen


def _on(model: Architecture, subject: Subject, device: EstimatedDevice) -> tuple[TrainingConfig, Plan, planner.Choice]:
    """The run on a kind of device: its configuration there, its way through the data, and its memory."""
    machine = Machine(kind=device.kind, bf16=True, flash_attention=True, flash_attention_3=True)
    config = resolve(subject.config, subject.given, machine).config
    planned = plan(model, config, subject.data)
    room = None if device.memory_mb is None else device.memory_mb * 2**20
    choices = planner.asked(config.gradient_checkpointing)
    precision = Precision.of(config, device.kind)
    return config, planned, planner.choose(model, config, precision, planned.batch, room, choices)


def _fit(model: Architecture, subject: Subject, device: EstimatedDevice, thorough: bool) -> Fit:
    config, planned, chosen = _on(model, subject, device)
    advice = []
    if thorough and device.memory_mb is not None and not chosen.fits:
        length = min(planned.batch.length, longest(model, config))
        room = device.memory_mb * 2**20
        advice = planner.advice(model, config, Precision.of(config, device.kind), length, room)
    return Fit(
        device=device,
        fits=None if device.memory_mb is None else chosen.fits,
        total_mb=round(chosen.memory.peak / 2**20, 1),
        gradient_checkpointing=chosen.checkpointing,
        reason=chosen.reason,
        advice=advice,
    )


def _of_time(settings: Settings, found: RunEstimate, took: Speed, operations: float) -> dict[str, Any]:
    cost = None
    if settings.gpu_hour_price is not None and found.device.kind == "cuda":
        amount = round(took.seconds / 3600 * settings.gpu_hour_price, 4)
        cost = Cost(amount=amount, currency=settings.price_currency)
    return {
        "flops": operations,
        "seconds": round(took.seconds, 1),
        "cost": cost,
        "confidence": found.confidence.model_copy(update={"seconds": took.source}),
        "assumptions": [*found.assumptions, took.sentence],
    }


def _unknown(devices: list[EstimatedDevice], reason: str) -> RunEstimate:
    device = devices[0] if devices else EstimatedDevice(kind="cuda", name=None, memory_mb=None)
    fits = [
        Fit(device=one, fits=None, total_mb=None, gradient_checkpointing=None, reason=reason, advice=[])
        for one in devices
    ]
    return RunEstimate(
        parameters=None,
        memory_mb=None,
        device=device,
        gradient_checkpointing=None,
        steps=None,
        tokens=None,
        flops=None,
        seconds=None,
        cost=None,
        confidence=Confidence(memory=None, seconds=None),
        fits=fits,
        assumptions=[],
        unknown=[Unknown(field=name, reason=reason) for name in ("parameters", "memory_mb", "steps", "seconds")],
    )
