"""Estimates of runs: combines the model's files, the available devices and the formulas."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, ParamSpec, Self, TypeVar
from weakref import WeakValueDictionary

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.gpus import Gpu, find_gpu
from anneal.contracts.methods import METHODS
from anneal.contracts.schemas.estimates import (
    Confidence,
    Cost,
    EstimatedDevice,
    Fit,
    Parameters,
    RunEstimate,
    Unknown,  # fmt: skip
)
from anneal.contracts.schemas.runs.placement import Placement, Resources
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities, sharding_obstacles
from app.api.dependencies import release_connection
from app.api.errors import dataset_not_found, invalid
from app.base_models import resolver
from app.config import Settings
from app.estimator import memory_planner
from app.estimator.activations import LIGER_PACKAGE, Precision, is_in_liger
from app.estimator.architecture import Architecture, UnknownArchitecture, read_architecture
from app.estimator.flops import RunFlops, estimate_flops, uncounted_parts
from app.estimator.memory import CONTEXT, WHOLE, Division
from app.estimator.parameters import CannotTrain, total_parameters, trainable_part
from app.estimator.steps import Data, make_step_plan, max_sequence_length, plan_steps
from app.infra.files.object_store import StoreUnavailable
from app.infra.storage import Storage
from app.runs.creating.estimates import hub_config
from app.runs.creating.estimates.devices import assumed_device, devices_of_gpu, online_devices, requested_words
from app.runs.creating.estimates.history import Speed, estimate_speed
from app.runs.creating.estimates.hub_config import HubConfig
from app.runs.creating.estimates.model_config import NoConfig, read_config
from app.runs.creating.plan import RunPlan
from app.tables.datasets import Dataset
from app.tables.runs import Run
from app.workers.queries import have_package, is_any_online

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_MOST_MB = 2**31 - 1
"""Largest estimated memory; claims compare it as an integer of Postgres."""
_WITH_PARAMETERS = "Unknown, because the model's parameters are unknown."
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


@dataclass(frozen=True)
class Subject:
    """Run to estimate; its configuration passes validation."""

    config: TrainingConfig
    user_set_fields: list[str]
    backend: str
    data: Data
    loads_model: bool = True
    """True if the backend loads a model; without a model there is nothing to estimate."""
    devices: int = 1
    """Devices that train together; the estimate of memory is that of each."""
    sharded: bool = False
    """True: weights, gradients and optimizer state are divided among the devices; else each has a replica."""
    sequence_parallel: int = 1
    """Number of devices that share each sequence."""
    expert_parallel: int = 1
    """Number of devices that share the experts of each layer."""
    placement: Placement = field(default_factory=Placement)
    """Devices that the request allows, of the kind that its configuration needs."""
    gpu: Gpu | None = None
    """GPU to estimate for, whether a worker has it or not; None: those of online workers."""

    @classmethod
    def from_plan(
        cls,
        planned: RunPlan,
        data: Data,
        *,
        fixed_fields: frozenset[str] = frozenset(),
        sharded: bool = False,
        gpu: Gpu | None = None,
    ) -> Self:
        """Return the subject of a planned run on its data, whose `fixed_fields` are not replaced either."""
        resources = planned.resources
        return cls(
            config=planned.config,
            user_set_fields=sorted(planned.user_set_fields | fixed_fields),
            backend=planned.backend,
            data=data,
            loads_model=planned.rules.loads_model,
            devices=resources.devices,
            sharded=sharded,
            sequence_parallel=resources.sequence_parallel,
            expert_parallel=resources.expert_parallel,
            placement=resources.model_copy(update={"kind": planned.device_kind}),
            gpu=gpu,
        )

    @property
    def division(self) -> Division:
        """Division of the model among the devices."""
        return Division(self.devices, self.expert_parallel) if self.sharded else WHOLE

    @property
    def data_parallel(self) -> int:
        """Number of devices, or groups of them, that the rows of a step are divided among."""
        return max(self.devices // self.sequence_parallel, 1)


@dataclass(frozen=True)
class EstimateInputs:
    """Inputs of an estimate that are read from the database."""

    devices: list[EstimatedDevice]
    """Kinds of devices that online workers offer and the request allows."""
    attempt: int | None
    """Attempt whose output is the base model, if the base model is a run."""
    missing: str | None = None
    """Sentence that names what the request asks for, if workers are online and none has it."""
    hub_config: HubConfig | None = None
    """Configuration of a hub model that is not on this machine, if it was requested."""
    has_liger: bool = False
    """True if every online worker with a GPU that the request allows has liger-kernel."""


async def estimate_run(
    sessions: async_sessionmaker[AsyncSession], settings: Settings, storage: Storage, subject: Subject
) -> RunEstimate:
    """Estimate the resources of a run; no transaction is open during the computation.

    Never raises for unknown values: they are null, with a reason under `unknown`.
    """
    async with sessions() as session:
        known = await look_up(session, settings, subject)
    known = replace(known, hub_config=await _fetch_hub_config(sessions, settings, storage, subject))
    computed, todo = await _run_in_thread(storage, subject.config, by_formula, settings, storage, subject, known, True)
    if todo is None:
        return computed
    operations = todo.training + todo.writing
    if known.missing is not None:
        return computed.model_copy(update={"flops": operations})
    config = resolve_config(
        subject.config, subject.user_set_fields, _typical_machine(computed.device.kind), sharded=subject.sharded
    ).config
    async with sessions() as session:
        device = computed.device.kind, computed.device.name
        took = await estimate_speed(session, config, device, subject.devices, todo)
    return computed.model_copy(update=_time_fields(settings, computed, took, operations, subject.devices))


async def _fetch_hub_config(
    sessions: async_sessionmaker[AsyncSession], settings: Settings, storage: Storage, subject: Subject
) -> HubConfig | None:
    if not subject.loads_model or resolver.is_run(subject.config.base_model):
        return None
    try:
        located = await asyncio.to_thread(
            resolver.locate_model, settings, storage, subject.config.base_model, None, subject.config.revision
        )
    except resolver.BaseModelError:
        return None
    if located["hub"] is None:
        return None
    async with sessions() as session:
        return await hub_config.fetch_hub_config(session, settings, located["hub"], located["revision"])


async def estimate_new(
    sessions: async_sessionmaker[AsyncSession],
    settings: Settings,
    storage: Storage,
    subject: Subject,
) -> tuple[RunEstimate, dict[str, int], bool]:
    """Estimate a run that was just created, without its duration.

    Also return its `least_memory`, and whether it is sharded, where that was not known before: the model is on the hub.
    """
    async with sessions() as session:
        known = await look_up(session, settings, subject)
    known = replace(known, hub_config=await _fetch_hub_config(sessions, settings, storage, subject))
    fetched = known.hub_config is not None  # otherwise it was computed before the run was created
    if fetched and subject.devices > 1 and subject.placement.sharding == "auto" and not subject.sharded:
        sharded = await _run_in_thread(
            storage, subject.config, must_shard, settings, storage, subject, known, known.devices
        )
        subject = replace(subject, sharded=bool(sharded))
    estimate, _ = await _run_in_thread(storage, subject.config, by_formula, settings, storage, subject, known, False)
    least = {}
    if fetched:
        least = await _run_in_thread(storage, subject.config, least_memory, settings, storage, subject, known)
    return estimate, least, subject.sharded


async def _run_in_thread(
    storage: Storage, config: TrainingConfig, work: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> T:
    """Run `work` in a thread, where no other estimate waits for the object store that it may read."""
    if storage.objects is not None and resolver.is_run(config.base_model):
        return await storage.in_thread(work, *arguments, **named)
    thread = _thread if work is by_formula else _creation_thread
    return await asyncio.get_running_loop().run_in_executor(thread, partial(work, *arguments, **named))


async def look_up(session: AsyncSession, settings: Settings, subject: Subject) -> EstimateInputs:
    """Read everything that `by_formula` needs from the database."""
    attempt = await _output_attempt(session, subject.config.base_model)
    if subject.gpu is not None:
        return EstimateInputs(await devices_of_gpu(session, settings, subject.backend, subject.gpu), attempt)
    devices = await online_devices(session, settings, subject.backend, subject.placement)
    missing = None
    is_fixed = not BACKEND_RULES[subject.backend].starts_workers  # a cluster has devices without workers
    if not devices and is_fixed and await is_any_online(session, settings, subject.backend):
        missing = f"No online worker of backend `{subject.backend}` has {requested_words(subject.placement)}."
    has_liger = await have_package(session, settings, subject.backend, "cuda", subject.placement, LIGER_PACKAGE)
    return EstimateInputs(devices, attempt, missing, has_liger=has_liger)


async def _output_attempt(session: AsyncSession, base_model: str) -> int | None:
    """Return the attempt whose output is the base model, if the base model is a run."""
    if not resolver.is_run(base_model):
        return None
    attempt: int | None = await session.scalar(select(Run.output_attempt).where(Run.id == base_model))
    return attempt


async def with_sharding(
    session: AsyncSession, settings: Settings, storage: Storage, subject: Subject, resources: Resources
) -> Subject:
    """Return the run with the decision whether its model is divided among its devices; unknown: as it was before.

    Ends the transaction of the session, as `architecture_of` and `least_memory_of` do.
    """
    if subject.devices == 1 or resources.sharding == "none" or not subject.loads_model:
        return replace(subject, sharded=False)
    if resources.sharding == "full" or resources.expert_parallel > 1:
        return replace(subject, sharded=True)
    known = await look_up(session, settings, subject)
    devices = known.devices
    if subject.gpu is None:
        devices = await online_devices(session, settings, subject.backend, resources)
    await release_connection(session)
    sharded = await _run_in_thread(storage, subject.config, must_shard, settings, storage, subject, known, devices)
    return subject if sharded is None else replace(subject, sharded=sharded)


def must_shard(
    settings: Settings, storage: Storage, subject: Subject, known: EstimateInputs, devices: Sequence[EstimatedDevice]
) -> bool | None:
    """Return True if the run can be sharded, and none of these devices holds a replica; None if that is not known.

    Call it in a thread, as `by_formula`.
    """
    extra = subject.config.trainer_options
    if any(one.kind == "cuda" for one in devices):
        devices = [one for one in devices if one.kind == "cuda"]  # as runs are placed
    if extra.model_factory or sharding_obstacles(subject.config, set(subject.user_set_fields)):
        return False
    try:
        model = read_architecture(read_config(settings, storage, subject.config, known.attempt, known.hub_config))
        replica = replace(subject, sharded=False)
        on = {kind: _OnKind(model, replica, kind, known) for kind in {one.kind for one in devices}}
        fits = [on[one.kind].choose_plan(one).fits for one in devices if one.memory_mb is not None]
    except (NoConfig, UnknownArchitecture, CannotTrain):
        return None
    return not any(fits) if fits else None


async def architecture_of(
    session: AsyncSession, settings: Settings, storage: Storage, config: TrainingConfig
) -> Architecture | None:
    """Return the architecture of the base model; None if it is not known on this machine."""
    known = EstimateInputs([], await _output_attempt(session, config.base_model))
    await release_connection(session)
    try:
        return read_architecture(
            await _run_in_thread(
                storage, config, read_config, settings, storage, config, known.attempt, known.hub_config
            )
        )
    except (NoConfig, UnknownArchitecture):
        return None


async def least_memory_of(
    session: AsyncSession, settings: Settings, storage: Storage, subject: Subject
) -> dict[str, int]:
    """Compute `least_memory` of a run that is about to be created; empty after an error, which is logged."""
    known = await look_up(session, settings, subject)
    await release_connection(session)
    try:
        return await _run_in_thread(storage, subject.config, least_memory, settings, storage, subject, known)
    except StoreUnavailable:
        return {}
    except Exception:
        log.exception("the memory of a run with base model %r cannot be estimated", subject.config.base_model)
        return {}


def by_formula(
    settings: Settings, storage: Storage, subject: Subject, known: EstimateInputs, thorough: bool
) -> tuple[RunEstimate, RunFlops | None]:
    """Estimate everything except the duration; also return the work (None: not known, or not requested).

    Reads the model's files and computes for about ten milliseconds, so call it in a thread. With `thorough`, covers
    every device, advises changes that make the run fit, and returns the work.
    """
    if not subject.loads_model:
        reason = f"Backend `{subject.backend}` loads no model, so there is nothing to estimate."
        return _unknown_estimate(subject, known, reason, has_steps=False), None
    if plugin := subject.config.trainer_options.model_factory:
        reason = f"`extra.model_factory` is the plugin `{plugin.type}`; its resource use cannot be estimated."
        return _unknown_estimate(subject, known, reason), None
    try:
        model = read_architecture(read_config(settings, storage, subject.config, known.attempt, known.hub_config))
        trainable_part(model, resolve_config(subject.config, subject.user_set_fields, None).config)
    except (NoConfig, UnknownArchitecture, CannotTrain) as error:
        return _unknown_estimate(subject, known, str(error)), None
    devices = known.devices or [assumed_device(subject.placement)]
    on: dict[str, _OnKind] = {}
    for device in devices if thorough else devices[:1]:
        if device.kind not in on:
            on[device.kind] = _OnKind(model, subject, device.kind, known)
    first = on[devices[0].kind]
    fits = [on[device.kind].check_fit(device, thorough) for device in known.devices if device.kind in on]
    if not thorough:
        fits = fits[:1]
    choice = first.choose_plan(devices[0])
    todo = estimate_flops(model, first.config, first.plan, choice.checkpointing) if thorough else None
    computed = _run_estimate(model, first, devices[0], choice, fits, thorough)
    return (computed if known.devices else _with_assumed_device(computed, known.missing)), todo


def least_memory(settings: Settings, storage: Storage, subject: Subject, known: EstimateInputs) -> dict[str, int]:
    """Return the least memory by kind of device, in MiB, below which the run cannot train; empty if it is not known.

    With `on_out_of_memory: repair` that is the smallest micro-batch with full recomputation, to which repairs lead.
    Call it in a thread, as `by_formula`.
    """
    extra = subject.config.trainer_options
    if extra.model_factory or extra.probe:
        return {}  # unknown, or a probe, which finds out by trying
    try:
        model = read_architecture(read_config(settings, storage, subject.config, known.attempt, known.hub_config))
        smallest = _smallest_variant(subject)
        kinds: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
        return {kind: _OnKind(model, smallest, kind, known).least_mb() for kind in kinds}
    except (NoConfig, UnknownArchitecture, CannotTrain):
        return {}


def _smallest_variant(subject: Subject) -> Subject:
    """Return the run after all repairs of its memory use."""
    if subject.config.on_out_of_memory == "stop":
        return subject
    rows = min(METHODS[subject.config.method].min_batch_size, subject.config.batch_size)
    smaller = {"batch_size": rows, "gradient_checkpointing": True}
    return replace(
        subject,
        config=subject.config.model_copy(update=smaller),
        user_set_fields=sorted({*subject.user_set_fields, *smaller}),
    )


async def data_of(session: AsyncSession, dataset_id: str) -> Data:
    """Return the known figures of a dataset; raises 422 if it was deleted since the validation of the request."""
    dataset = await session.get(Dataset, dataset_id)
    if dataset is None:
        missing = dataset_not_found("dataset_id", dataset_id)
        raise invalid([missing], code=missing.code)
    return Data(dataset.rows, dataset.bytes, dataset.token_statistics)


def _typical_machine(kind: Literal["cpu", "cuda"]) -> DeviceCapabilities:
    return DeviceCapabilities(kind=kind, bf16=True, flash_attention=True, flash_attention_3=True)


class _OnKind:
    """Run on one kind of device: its resolved configuration, its step plan, and its memory.

    Memory use is the same on all devices of a kind, so each variant is computed once.
    """

    def __init__(
        self, model: Architecture, subject: Subject, kind: Literal["cpu", "cuda"], known: EstimateInputs
    ) -> None:
        self.config = resolve_config(
            subject.config,
            subject.user_set_fields,
            _typical_machine(kind),
            sharded=subject.sharded,
            stored=model.stored_quantization,
        ).config
        self.division, self.sequence_parallel = subject.division, subject.sequence_parallel
        planned = plan_steps(model, self.config, subject.data, subject.data_parallel)
        self.plan = replace(planned, batch=replace(planned.batch, sequence_parallel=self.sequence_parallel))
        self.precision = Precision.for_device(self.config, kind, has_liger=known.has_liger)
        self.uses_liger = self.precision.has_liger and is_in_liger(model, self.config)
        self._needs = memory_planner.memory_of_choices(
            model, self.config, self.precision, self.plan.batch, self.division
        )
        length = min(self.plan.batch.length, max_sequence_length(model, self.config))
        self._advice = memory_planner.MemoryAdvice(
            model, self.config, self.precision, length, self.plan.rows, self.division, self.sequence_parallel
        )

    def choose_plan(self, device: EstimatedDevice) -> memory_planner.Choice:
        """Return the planner's choice for that device."""
        choices = memory_planner.allowed_choices(self.config.gradient_checkpointing)
        return memory_planner.first_that_fits(self._needs, _memory_bytes(device), choices)

    def least_mb(self) -> int:
        """Return the memory of the smallest choice in MiB, at most `_MOST_MB`."""
        choices = memory_planner.allowed_choices(self.config.gradient_checkpointing)
        return min(_MOST_MB, math.ceil(min(self._needs(one).peak for one in choices) / 2**20))

    def check_fit(self, device: EstimatedDevice, thorough: bool) -> Fit:
        """Check that the run fits on the device; with `thorough`, advise a change if it does not."""
        chosen, room = self.choose_plan(device), _memory_bytes(device)
        advice = []
        if thorough and room is not None and not chosen.fits:
            advice = self._advice.advise_within(room)
        return Fit(
            device=device,
            fits=None if room is None else chosen.fits,
            total_mb=round(chosen.memory.peak / 2**20, 1),
            gradient_checkpointing=chosen.checkpointing,
            reason=chosen.reason,
            advice=advice,
        )


def _memory_bytes(device: EstimatedDevice) -> int | None:
    return None if device.memory_mb is None else device.memory_mb * 2**20


def _run_estimate(
    model: Architecture,
    on: _OnKind,
    device: EstimatedDevice,
    choice: memory_planner.Choice,
    fits: list[Fit],
    thorough: bool,
) -> RunEstimate:
    reason_without_seconds = "The duration is estimated only by `POST /v1/runs/estimate`."
    unknown = [] if thorough else [Unknown(field="seconds", reason=reason_without_seconds)]
    if source := on.config.trainer_options.data_source:
        reason = _of_source(source.type)
        known = ("steps",) if on.plan.steps is not None else ()
        fields = ("steps", "tokens", "flops", "seconds", "cost")
        unknown = [Unknown(field=name, reason=reason) for name in fields if name not in known]
    return RunEstimate(
        parameters=Parameters(
            total=total_parameters(model, reward_head=METHODS[on.config.method].has_reward_head),
            trainable=trainable_part(model, on.config).count,
        ),
        memory_mb=choice.memory.as_megabytes(),
        device=device,
        gradient_checkpointing=choice.checkpointing,
        steps=on.plan.steps,
        tokens=on.plan.tokens,
        flops=None,
        seconds=None,
        cost=None,
        confidence=Confidence(memory="formula", seconds=None),
        fits=fits,
        assumptions=_memory_assumptions(on, device),
        unknown=unknown,
    )


def _with_assumed_device(estimate: RunEstimate, missing: str | None) -> RunEstimate:
    """Return the estimate for an assumed device, with the reason; without its time if no worker has such a device."""
    why = missing or "No online worker of this backend has a device for the run."
    what = "a GPU with bfloat16" if estimate.device.kind == "cuda" else "a CPU"
    assumptions = [f"{why.removesuffix('.')}; {what} is assumed.", *estimate.assumptions]
    unknown = list(estimate.unknown)
    if missing and all(one.field != "seconds" for one in unknown):
        unknown += [Unknown(field=name, reason=missing) for name in ("seconds", "cost")]
    return estimate.model_copy(update={"assumptions": assumptions, "unknown": unknown})


def _memory_assumptions(on: _OnKind, device: EstimatedDevice) -> list[str]:
    config = on.config
    where = "A process with torch" if device.kind == "cpu" else "The context of CUDA and its libraries"
    sentences = [
        f"{where} takes {CONTEXT[device.kind] // 2**20} MiB before any tensor.",
        "Memory is computed for the longest sequences; the total is the peak within a step.",
        *on.plan.assumptions,
        *uncounted_parts(config, on.plan),
    ]
    if on.uses_liger:
        sentences.append(
            "Norms, rotary embeddings and gated layers are those of liger-kernel, as on every such worker."
        )
    if on.division.shards > 1:
        sentences.append(f"Weights, gradients and optimizer state are divided among {on.division.shards} devices.")
    if on.division.experts > 1:
        count = on.division.experts
        sentences.append(
            f"The experts of a layer are divided among {count} devices, which get equal numbers of tokens."
        )
    if on.sequence_parallel > 1:
        sentences.append(f"The activations of each sequence are divided among {on.sequence_parallel} devices.")
    if plugin := config.trainer_options.optimizer:
        sentences.append(
            f"The state of `extra.optimizer` (`{plugin.type}`) is unknown; two 32-bit values per trainable parameter "
            "are assumed, as for AdamW."
        )
    elif config.optim.startswith("paged_"):
        sentences.append(
            "Paged optimizer state is included, although it moves to the host when memory is scarce and is not part "
            "of the memory that torch reports as allocated."
        )
    return sentences


def _time_fields(
    settings: Settings, estimate: RunEstimate, took: Speed, operations: float, devices: int
) -> dict[str, Any]:
    """Return the duration, and what follows from it; the cost is that of all devices."""
    cost = None
    gpu = find_gpu(estimate.device.name)
    price = settings.gpu_hour_price if gpu is None else settings.prices_by_gpu.get(gpu.name, settings.gpu_hour_price)
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


def _unknown_estimate(subject: Subject, known: EstimateInputs, reason: str, *, has_steps: bool = True) -> RunEstimate:
    """Build an estimate without the model; without `has_steps`, they do not follow from its rows either."""
    unknown = [Unknown(field="parameters", reason=reason)]
    unknown += [Unknown(field=name, reason=_WITH_PARAMETERS) for name in ("memory_mb", "seconds")]
    steps = tokens = None
    assumed: list[str] = []
    if has_steps:
        steps, tokens, assumed = _without_model(subject, unknown)
    else:
        unknown += [Unknown(field=name, reason=_WITH_PARAMETERS) for name in ("steps", "tokens")]
    if known.missing is not None:
        assumed = [known.missing, *assumed]
    fits = [
        Fit(device=one, fits=None, total_mb=None, gradient_checkpointing=None, reason=_WITH_PARAMETERS, advice=[])
        for one in known.devices
    ]
    return RunEstimate(
        parameters=None,
        memory_mb=None,
        device=known.devices[0] if known.devices else assumed_device(subject.placement),
        gradient_checkpointing=None,
        steps=steps,
        tokens=tokens,
        flops=None,
        seconds=None,
        cost=None,
        confidence=Confidence(memory=None, seconds=None),
        fits=fits,
        assumptions=assumed,
        unknown=unknown,
    )


def _without_model(subject: Subject, unknown: list[Unknown]) -> tuple[int | None, int | None, list[str]]:
    """Return steps, tokens and assumptions derived from rows and batches; append the rest to `unknown`."""
    config = resolve_config(subject.config, subject.user_set_fields, None).config
    step_plan = make_step_plan(config, subject.data, config.max_seq_length or 2**31, subject.data_parallel)
    if source := config.trainer_options.data_source:
        reason = _of_source(source.type)
        unknown += [Unknown(field="steps", reason=reason)] if step_plan.steps is None else []
        unknown.append(Unknown(field="tokens", reason=reason))
        return step_plan.steps, None, []
    if config.max_seq_length is None:
        reason = "Without `max_seq_length` the sequence length depends on the model, which is not known."
        unknown.append(Unknown(field="tokens", reason=reason))
        return step_plan.steps, None, []
    limit = "The model's own sequence limit is not known, so no sequence is assumed to be cut by it."
    return step_plan.steps, step_plan.tokens, [*step_plan.assumptions, limit]


def _of_source(name: str) -> str:
    return f"`extra.data_source` is the plugin `{name}`; its number of rows is not known."
