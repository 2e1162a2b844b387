"""Estimates by formula: they read the model's files and compute, so call them in a thread."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from anneal.contracts.methods import METHODS
from anneal.contracts.schemas.estimates import Confidence, EstimatedDevice, Fit, Parameters, RunEstimate, Unknown
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import sharding_obstacles
from app.config import Settings
from app.estimator import memory_planner
from app.estimator.architecture import Architecture, UnknownArchitecture, read_architecture
from app.estimator.flops import RunFlops, estimate_flops
from app.estimator.parameters import CannotTrain, total_parameters, trainable_part
from app.infra.storage import Storage
from app.runs.creating.estimates.devices import assumed_device
from app.runs.creating.estimates.inputs import EstimateInputs, Subject, teacher_config
from app.runs.creating.estimates.model_config import NoConfig, read_config
from app.runs.creating.estimates.run_on_kind import RunOnKind
from app.runs.creating.estimates.sentences import (
    memory_assumptions,
    source_reason,
    unknown_estimate,
    with_assumed_device,
)


def read_model(settings: Settings, storage: Storage, config: TrainingConfig, known: EstimateInputs) -> Architecture:
    """Read the architecture of the base model; raises `NoConfig` or `UnknownArchitecture`."""
    return read_architecture(read_config(settings, storage, config, known.attempt, known.hub_config))


def _with_teacher(
    settings: Settings, storage: Storage, config: TrainingConfig, known: EstimateInputs
) -> EstimateInputs:
    """Return the inputs with the architecture of the teacher, if the run has one that is known here."""
    teacher = teacher_config(config)
    if teacher is None:
        return known
    try:
        model_config = read_config(settings, storage, teacher, known.teacher_attempt, known.teacher_hub_config)
        return replace(known, teacher=read_architecture(model_config))
    except (NoConfig, UnknownArchitecture):
        return known


def estimate_by_formula(
    settings: Settings, storage: Storage, subject: Subject, known: EstimateInputs, thorough: bool
) -> tuple[RunEstimate, RunFlops | None]:
    """Estimate everything except the duration; also return the work (None: not known, or not requested).

    Reads the model's files and computes for about ten milliseconds, so call it in a thread. With `thorough`, covers
    every device, advises changes that make the run fit, and returns the work.
    """
    plan = subject.plan
    if not plan.rules.loads_model:
        reason = f"Backend `{plan.backend}` loads no model, so there is nothing to estimate."
        return unknown_estimate(subject, known, reason, has_steps=False), None
    if plugin := plan.config.trainer_options.model_factory:
        reason = f"`extra.model_factory` is the plugin `{plugin.type}`; its resource use cannot be estimated."
        return unknown_estimate(subject, known, reason), None
    try:
        model = read_model(settings, storage, plan.config, known)
        known = _with_teacher(settings, storage, plan.config, known)
        trainable_part(model, resolve_config(plan.config, subject.user_set_fields, None).config)
    except (NoConfig, UnknownArchitecture, CannotTrain) as error:
        return unknown_estimate(subject, known, str(error)), None
    devices = known.devices or [assumed_device(subject.placement)]
    on: dict[str, RunOnKind] = {}
    for device in devices if thorough else devices[:1]:
        if device.kind not in on:
            on[device.kind] = RunOnKind(model, subject, device.kind, known)
    first = on[devices[0].kind]
    fits = [on[device.kind].check_fit(device, thorough) for device in known.devices if device.kind in on]
    if not thorough:
        fits = fits[:1]
    choice = first.choose_plan(devices[0])
    todo = estimate_flops(model, first.config, first.plan, choice.checkpointing) if thorough else None
    computed = _run_estimate(model, first, devices[0], choice, fits, thorough)
    return (computed if known.devices else with_assumed_device(computed, known.missing)), todo


def least_memory(settings: Settings, storage: Storage, subject: Subject, known: EstimateInputs) -> dict[str, int]:
    """Return the least memory by kind of device, in MiB, below which the run cannot train; empty if it is not known.

    With `on_out_of_memory: repair` that is the smallest micro-batch with full recomputation, to which repairs lead.
    Call it in a thread, as `estimate_by_formula`.
    """
    extra = subject.plan.config.trainer_options
    if extra.model_factory or extra.probe:
        return {}  # unknown, or a probe, which finds out by trying
    try:
        model = read_model(settings, storage, subject.plan.config, known)
        known = _with_teacher(settings, storage, subject.plan.config, known)
        smallest = _smallest_variant(subject)
        kinds: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
        return {kind: RunOnKind(model, smallest, kind, known).least_mb() for kind in kinds}
    except (NoConfig, UnknownArchitecture, CannotTrain):
        return {}


def _smallest_variant(subject: Subject) -> Subject:
    """Return the run after all repairs of its memory use."""
    plan, config = subject.plan, subject.plan.config
    if config.on_out_of_memory == "stop":
        return subject
    rows = min(METHODS[config.method].min_batch_size, config.batch_size)
    smaller = {"batch_size": rows, "gradient_checkpointing": True}
    config, set_fields = config.model_copy(update=smaller), plan.user_set_fields | smaller.keys()
    return replace(subject, plan=replace(plan, config=config, user_set_fields=set_fields))


def must_shard(
    settings: Settings, storage: Storage, subject: Subject, known: EstimateInputs, devices: Sequence[EstimatedDevice]
) -> bool | None:
    """Return True if the run can be sharded, and none of these devices holds a replica; None if that is not known.

    Call it in a thread, as `estimate_by_formula`.
    """
    extra = subject.plan.config.trainer_options
    if any(one.kind == "cuda" for one in devices):
        devices = [one for one in devices if one.kind == "cuda"]  # as runs are placed
    if extra.model_factory or sharding_obstacles(subject.plan.config, set(subject.user_set_fields)):
        return False
    try:
        model = read_model(settings, storage, subject.plan.config, known)
        replica = replace(subject, sharded=False)
        on = {kind: RunOnKind(model, replica, kind, known) for kind in {one.kind for one in devices}}
        fits = [on[one.kind].choose_plan(one).fits for one in devices if one.memory_mb is not None]
    except (NoConfig, UnknownArchitecture, CannotTrain):
        return None
    return not any(fits) if fits else None


def _run_estimate(
    model: Architecture,
    on: RunOnKind,
    device: EstimatedDevice,
    choice: memory_planner.Choice,
    fits: list[Fit],
    thorough: bool,
) -> RunEstimate:
    reason_without_seconds = "The duration is estimated only by `POST /v1/runs/estimate`."
    unknown = [] if thorough else [Unknown(field="seconds", reason=reason_without_seconds)]
    if source := on.config.trainer_options.data_source:
        reason = source_reason(source.type)
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
        assumptions=memory_assumptions(on, device),
        unknown=unknown,
    )
