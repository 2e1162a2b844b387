"""Estimates of runs: reads what they are computed from, and computes in threads."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from anneal.contracts.schemas.estimates import Cost, RunEstimate
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from app.api.dependencies import release_connection
from app.base_models import resolver
from app.config import Settings
from app.estimator.architecture import Architecture, UnknownArchitecture
from app.infra.files.object_store import StoreUnavailable
from app.infra.storage import Storage
from app.runs.creating.estimates.devices import online_devices
from app.runs.creating.estimates.formulas import estimate_by_formula, least_memory, must_shard, read_model
from app.runs.creating.estimates.history import Speed, estimate_speed
from app.runs.creating.estimates.inputs import (
    EstimateInputs,
    Subject,
    fetch_base_config,
    find_output_attempt,
    read_inputs,
    teacher_config,
)
from app.runs.creating.estimates.model_config import NoConfig
from app.runs.creating.estimates.run_on_kind import typical_machine

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# A requested estimate of a deep model takes up to some seconds of Python, and what the creation of a run needs of it
# some hundredths; single threads keep the event loop responsive.
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="estimates")
_creation_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="requirements")


class EstimateTurns:
    """Lets requested estimates of one key follow each other, so that those of other keys wait for few of them."""

    def __init__(self) -> None:
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def take_turn(self, key_id: str) -> AsyncIterator[None]:
        """Wait until no other estimate of this key is being computed."""
        semaphore = self._semaphores.setdefault(key_id, asyncio.Semaphore(1))
        async with semaphore:
            yield


async def estimate_run(
    sessions: async_sessionmaker[AsyncSession], settings: Settings, storage: Storage, subject: Subject
) -> RunEstimate:
    """Estimate the resources of a run; no transaction is open during the computation.

    Never raises for unknown values: they are null, with a reason under `unknown`.
    """
    known = await _read_inputs_and_config(sessions, settings, storage, subject)
    plan = subject.plan
    computed, todo = await _run_in_thread(
        storage, plan.config, estimate_by_formula, settings, storage, subject, known, True
    )
    if todo is None:
        return computed
    operations = todo.training + todo.writing
    if known.missing is not None:
        return computed.model_copy(update={"flops": operations})
    config = resolve_config(
        plan.config, subject.user_set_fields, typical_machine(computed.device.kind), sharded=subject.sharded
    ).config
    async with sessions() as session:
        device = computed.device.kind, computed.device.name
        took = await estimate_speed(session, config, device, plan.resources.devices, todo)
    took = took.bounded(computed.steps)
    return computed.model_copy(update=_time_fields(settings, computed, took, operations, plan.resources.devices))


async def estimate_new(
    sessions: async_sessionmaker[AsyncSession],
    settings: Settings,
    storage: Storage,
    subject: Subject,
) -> tuple[RunEstimate, dict[str, int], bool]:
    """Estimate a run that was just created, without its duration.

    Also return its `least_memory`, and whether it is sharded, where that was not known before: the model is on the hub.
    """
    known = await _read_inputs_and_config(sessions, settings, storage, subject)
    config, resources = subject.plan.config, subject.plan.resources
    fetched = bool(known.hub_config or known.teacher_hub_config)  # otherwise it was computed before the run was created
    if fetched and resources.devices > 1 and resources.sharding == "auto" and not subject.sharded:
        sharded = await _run_in_thread(storage, config, must_shard, settings, storage, subject, known, known.devices)
        subject = replace(subject, sharded=bool(sharded))
    estimate, _ = await _run_in_thread(storage, config, estimate_by_formula, settings, storage, subject, known, False)
    least = {}
    if fetched:
        least = await _run_in_thread(storage, config, least_memory, settings, storage, subject, known)
    return estimate, least, subject.sharded


async def _read_inputs_and_config(
    sessions: async_sessionmaker[AsyncSession], settings: Settings, storage: Storage, subject: Subject
) -> EstimateInputs:
    """Read the inputs of an estimate, with the configuration of a model that is only on the hub."""
    async with sessions() as session:
        known = await read_inputs(session, settings, subject)
    if not subject.plan.rules.loads_model:
        return known
    config, teacher = subject.plan.config, teacher_config(subject.plan.config)
    return replace(
        known,
        hub_config=await fetch_base_config(sessions, settings, storage, config),
        teacher_hub_config=None if teacher is None else await fetch_base_config(sessions, settings, storage, teacher),
    )


async def _run_in_thread(
    storage: Storage, config: TrainingConfig, work: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> T:
    """Run `work` in a thread, where no other estimate waits for the object store that it may read."""
    teacher = teacher_config(config)
    models = [config.base_model, *([teacher.base_model] if teacher else [])]
    if storage.objects is not None and any(resolver.is_run(name) for name in models):
        return await storage.in_thread(work, *arguments, **named)
    thread = _thread if work is estimate_by_formula else _creation_thread
    return await asyncio.get_running_loop().run_in_executor(thread, partial(work, *arguments, **named))


async def with_sharding(session: AsyncSession, settings: Settings, storage: Storage, subject: Subject) -> Subject:
    """Return the run with the decision whether its model is divided among its devices; unknown: as it was before.

    Ends the transaction of the session, as `architecture_of` and `least_memory_of` do.
    """
    plan, resources = subject.plan, subject.plan.resources
    if resources.devices == 1 or resources.sharding == "none" or not plan.rules.loads_model:
        return replace(subject, sharded=False)
    if resources.sharding == "full" or resources.expert_parallel > 1:
        return replace(subject, sharded=True)
    known = await read_inputs(session, settings, subject)
    devices = known.devices if subject.gpu is not None else online_devices(known.workers, resources)
    await release_connection(session)
    sharded = await _run_in_thread(storage, plan.config, must_shard, settings, storage, subject, known, devices)
    return subject if sharded is None else replace(subject, sharded=sharded)


async def architecture_of(
    session: AsyncSession, settings: Settings, storage: Storage, config: TrainingConfig
) -> Architecture | None:
    """Return the architecture of the base model; None if it is not known on this machine."""
    known = EstimateInputs([], await find_output_attempt(session, config.base_model))
    await release_connection(session)
    try:
        return await _run_in_thread(storage, config, read_model, settings, storage, config, known)
    except (NoConfig, UnknownArchitecture):
        return None


async def least_memory_of(
    session: AsyncSession, settings: Settings, storage: Storage, subject: Subject
) -> dict[str, int]:
    """Compute `least_memory` of a run that is about to be created; empty after an error, which is logged."""
    known, config = await read_inputs(session, settings, subject), subject.plan.config
    await release_connection(session)
    try:
        return await _run_in_thread(storage, config, least_memory, settings, storage, subject, known)
    except StoreUnavailable:
        return {}
    except Exception:
        log.exception("the memory of a run with base model %r cannot be estimated", config.base_model)
        return {}


def _time_fields(
    settings: Settings, estimate: RunEstimate, took: Speed, operations: float, devices: int
) -> dict[str, Any]:
    """Return the duration, and what follows from it; the cost is that of all devices."""
    cost = None
    price = settings.gpu_price(estimate.device.name)
    if price is not None and estimate.device.kind == "cuda":
        amount = round(took.seconds * devices / 3600 * price, 4)
        cost = Cost(amount=amount, currency=settings.price_currency)
    return {
        "flops": operations,
        "seconds": round(took.seconds, 1),
        "cost": cost,
        "confidence": estimate.confidence.model_copy(update={"seconds": took.source}),
        "assumptions": [*estimate.assumptions, *took.sentences],
    }
