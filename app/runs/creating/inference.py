"""Creates runs that use the weights of a model without training it: evaluations and predictions.

The model is a base model, the output of a run or a checkpoint. A run's weights are loaded with its own configuration.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.errors import FieldError
from anneal.contracts.methods import Method, method_of
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.requests import InferenceCreate, RunCreate
from anneal.contracts.training_config.adapters import CHANGES_BASE
from anneal.contracts.training_config.field_traits import ADAPTER_ONLY, FOUR_BIT_ONLY
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import (
    GROUPS,
    drop_unknown_fields,
    given_fields,
    without_defaults,
)
from app.api.dependencies import release_connection
from app.api.errors import invalid
from app.base_models import resolver
from app.config import Settings
from app.infra.ids import is_id
from app.infra.storage import Storage
from app.runs.creating.creation import (
    RunTransaction,
    default_experiment,
    find_by_idempotency_key,
    find_locked_run,
    insert_run,
)
from app.runs.creating.plan import NewRun
from app.runs.creating.requirements import build_requirements
from app.runs.creating.validation.request import lock_references, validate_request
from app.runs.state.service import lock_runs
from app.tables.checkpoints import Checkpoint
from app.tables.datasets import Dataset
from app.tables.runs import Run

_BACKEND = "celery"
_OF_QUANTIZED_ADAPTER = frozenset({*ADAPTER_ONLY, *FOUR_BIT_ONLY, "load_in_4bit", "load_in_8bit"})


@dataclass(frozen=True)
class Changes:
    """Differences between the configuration of a run and the one with which its weights are used."""

    values: dict[str, Any]
    """Values as a user would write them."""
    dropped: frozenset[str]
    """Fields, or groups of them, whose values are not those of the run."""

    def kept_fields(self, run: Run) -> set[str]:
        """Return the fields that the user of the run has set and that keep their values."""
        return {name for name in run.user_set_fields if not {name, name.partition(".")[0]} & self.dropped}


@dataclass(frozen=True)
class _Subject:
    """Model to use: a configuration to load it with, and the run that has trained its weights, if any."""

    config: dict[str, Any]
    """Configuration as a user would write it."""
    trained: Run | None = None
    checkpoint: Checkpoint | None = None
    changes: Changes | None = None
    """Set if there is a run."""


class Inference(ABC):
    """Configuration of the runs of a task that uses a model."""

    task: ClassVar[RunTask]
    noun: ClassVar[str]
    """Name of such a run."""
    reason: ClassVar[str]
    """Verb of the reason why it was created."""
    added: ClassVar[Mapping[str, Any]] = {}
    """Values without which its configuration is not valid; the stored one has their defaults."""

    def __init__(self, request: InferenceCreate) -> None:
        self.request = request

    @abstractmethod
    def base_config(self, dataset: Dataset | None) -> dict[str, Any]:
        """Return the configuration that loads a base model as it is: by default unquantized, without an adapter."""

    @abstractmethod
    def changes_of(self, run: Run, dataset: Dataset | None, *, has_output: bool) -> Changes:
        """Return how the configuration of a run changes; with `has_output`, its output is used, else a checkpoint."""

    @abstractmethod
    def overrides(self, run: Run, changes: Changes) -> Mapping[str, Any]:
        """Return the values that the request sets for the weights of a run; raise 422 for those that it cannot set."""


async def create_inference(
    transaction: RunTransaction, settings: Settings, storage: Storage, inference: Inference
) -> Run:
    """Create a run that uses a model, or raise 422 with all errors; the same idempotency key returns the same run."""
    if earlier := await find_by_idempotency_key(transaction.session, transaction.caller_id, transaction.idempotency):
        return earlier
    new = await plan_inference(transaction.session, settings, storage, inference, transaction.caller_id)
    return await insert_run(transaction, new)


async def plan_inference(
    session: AsyncSession, settings: Settings, storage: Storage, inference: Inference, caller_id: str | None
) -> NewRun:
    """Return the run to insert, with the rows that it refers to locked, or raise 422 with all errors."""
    request = inference.request
    dataset = None if request.dataset_id is None else await session.get(Dataset, request.dataset_id)
    subject = await _find_subject(session, settings, storage, inference, dataset)
    run = subject.trained
    # Not validated again: that of a run, with what the request adds, may be longer than one that a request may send.
    run_request = RunCreate.model_construct(
        backend=_BACKEND,
        experiment_id=request.experiment_id,
        dataset_id=request.dataset_id,  # type: ignore[arg-type]  # None for a serving run
        config={**subject.config, **inference.added},
        resources=request.resources,
    )
    validation = await validate_request(session, settings, storage, run_request, task=inference.task)
    validation.errors = [_about_request(error) for error in validation.errors]
    plan = validation.require_plan()
    config, user_set_fields = plan.config, set(plan.user_set_fields) - inference.added.keys()
    await release_connection(session)
    if run is not None and subject.changes is not None:
        overrides = inference.overrides(run, subject.changes)
        user_set_fields |= subject.changes.kept_fields(run)
        config = await asyncio.to_thread(_as_trained, run, subject.changes, overrides, user_set_fields)
    await lock_runs(session, {*plan.reward_run_ids, plan.base_run_id, run.id if run else None}, for_child=True)
    await _lock_weights(session, request.model)
    await lock_references(session, run_request, plan)
    is_output = run is not None and subject.checkpoint is None
    config = config.model_copy(update={name: TrainingConfig.model_fields[name].default for name in inference.added})
    plan = replace(
        plan,
        config=config,
        user_set_fields=frozenset(user_set_fields),
        base_run_id=run.id if run is not None and is_output else plan.base_run_id,
    )
    # The estimate is of a training, which takes more memory.
    requirements = build_requirements(plan, least={}, sharded=plan.requires_sharding)
    return NewRun(
        plan=replace(plan, requirements=requirements),
        experiment_id=request.experiment_id or (await _experiment_id(session, run, caller_id)),
        name=request.name or f"{inference.noun} of {run.name if run else request.model}"[:200],
        tags=request.tags,
        priority=request.priority,
        warnings=validation.warnings,
        parent_run_id=subject.checkpoint.run_id if subject.checkpoint else None,
        resume_checkpoint_id=subject.checkpoint.id if subject.checkpoint else None,
        reason=f"{inference.reason} {request.model}",
    )


def _about_request(error: FieldError) -> FieldError:
    """Return an error by the field of the request in which the value was given."""
    if error.field == "config.base_model":
        return error.model_copy(update={"field": "model"})
    return error.model_copy(update={"field": error.field.replace("config.extra.predict.", "config.")})


async def _experiment_id(session: AsyncSession, run: Run | None, caller_id: str | None) -> str:
    return run.experiment_id if run else (await default_experiment(session, caller_id)).id


async def _find_subject(
    session: AsyncSession, settings: Settings, storage: Storage, inference: Inference, dataset: Dataset | None
) -> _Subject:
    """Find the model that the request names; may end the transaction of the session.

    Without `dataset`, which does not exist, the request is refused later.
    """
    run, checkpoint = await _lock_weights(session, inference.request.model)
    if run is None:
        return _Subject(inference.base_config(dataset))
    if not BACKEND_RULES[run.backend].loads_model:
        raise model_error("not_a_model", f"run {run.id} is of backend `{run.backend}`, which trains no model")
    if run.task in (RunTask.predict, RunTask.serve):
        why = f"run {run.id} only answers (task `{run.task}`): name the model that it has used"
        raise model_error("not_a_model", why)
    changes = inference.changes_of(run, dataset, has_output=checkpoint is None)
    if checkpoint is None:
        await release_connection(session)
        await _check_output(settings, storage, run)
    overrides = inference.overrides(run, changes)
    inherited = {name: value for name, value in run.config.items() if name not in changes.dropped}
    config = without_defaults(inherited, changes.kept_fields(run))
    config.pop("optim", None)  # whether its state can be divided does not matter
    return _Subject(merge_config(merge_config(config, changes.values), overrides), run, checkpoint, changes)


def required_changes(
    run: Run, method: Method, *, has_output: bool, keeps_method: bool, of_method: Mapping[str, Any]
) -> Changes:
    """Return how the loss of another method, and an output that is no adapter, change the configuration of a run.

    `method` is the one with which its weights can be used, and `of_method` are its options. With `keeps_method`, the
    run keeps its own unless its output is no adapter and that method needs one. With `has_output`, the output is used,
    otherwise a checkpoint.
    """
    own = method_of(run.config)
    is_merged = has_output and run.config.get("output") == "merged"
    values: dict[str, Any] = {}
    dropped: set[str] = set()
    if keeps_method and not (is_merged and own.adapter == "required"):
        method = own
    else:
        values |= {"method": method.name.value, **of_method}
    is_adapter = own.trains_adapter(run.config["lora_r"]) and not is_merged
    if method is not own and is_adapter:
        is_quantized = own.quantization != "forbidden"
        values["lora_r"] = run.config["lora_r"]
        values["load_in_8bit"] = is_quantized and run.config["load_in_8bit"]
        values["load_in_4bit"] = is_quantized and not values["load_in_8bit"] and run.config["load_in_4bit"]
        if method.has_reference and run.config.get("init_lora_weights") in CHANGES_BASE:
            if not has_output:
                why = f"the checkpoints of run {run.id} are for a changed base, and the loss on these data needs "
                why += "the unchanged one: evaluate the output of the run, or export the checkpoint and evaluate that"
                raise model_error("checkpoint_changes_base", why)
            values["init_lora_weights"] = "default"  # the output has been converted for the unchanged base
    elif is_merged or method is not own:
        dropped |= _OF_QUANTIZED_ADAPTER
        values |= {} if method.adapter == "forbidden" else {"lora_r": None}
    if is_merged and not method.has_reference:
        # It is a model of its own. A reference is the base model, into which the weights are loaded otherwise.
        dropped.add("revision")
        values["base_model"] = run.id
    return Changes(values, frozenset(dropped - values.keys()))


async def _lock_weights(session: AsyncSession, model: str) -> tuple[Run | None, Checkpoint | None]:
    """Return the run and the checkpoint that `model` names, if any, locked against deletion until the commit."""
    run = checkpoint = None
    if is_id(model, "ckpt"):
        # In the order in which the deletion of a run locks both: the run first.
        owner = await session.scalar(select(Checkpoint.run_id).where(Checkpoint.id == model))
        run = await find_locked_run(session, owner) if owner else None
        query = select(Checkpoint).where(Checkpoint.id == model).with_for_update(read=True)
        checkpoint = await session.scalar(query.execution_options(populate_existing=True))
        if checkpoint is None:
            message = "there is no such checkpoint; GET /v1/runs/{id}/checkpoints lists them"
            raise model_error("checkpoint_not_found", message)
        if checkpoint.deleted_at is not None or checkpoint.bad_reason is not None:
            why = "was deleted" if checkpoint.deleted_at else f"is corrupt ({checkpoint.bad_reason})"
            raise model_error("checkpoint_unusable", f"this checkpoint {why}; use another one")
    elif resolver.is_run(model):
        run = await find_locked_run(session, model)
        if run is None:
            raise model_error("run_not_found", "there is no such run; GET /v1/runs?status=completed lists usable runs")
    return run, checkpoint


async def _check_output(settings: Settings, storage: Storage, run: Run) -> None:
    if run.output_attempt is None:
        message = f"run {run.id} is {run.status} and has no output; {_alternative_to_output(run)}"
        raise model_error("run_without_output", message)
    try:
        await storage.in_thread(resolver.locate_model, settings, storage, run.id, run.output_attempt)
    except resolver.BaseModelError as error:
        raise model_error(error.code, error.message) from error


def _alternative_to_output(run: Run) -> str:
    """Return what to use instead of the output of a run."""
    if run.task == RunTask.train:
        return "use one of its checkpoints (`ckpt_…`)"
    subject = run.resume_checkpoint_id or run.base_run_id or run.config["base_model"]
    return f"its task is `{run.task}`, so it has no checkpoints: use {subject}, whose weights these are"


def _as_trained(run: Run, changes: Changes, overrides: Mapping[str, Any], user_set_fields: set[str]) -> TrainingConfig:
    """Return the configuration of a run without what concerns its training, and with what the request sets."""
    dropped_fields = changes.dropped
    inherited = {name: value for name, value in run.config.items() if name not in dropped_fields}
    if "loss_on" not in dropped_fields:
        # The default depends on the data that the run was trained on, not on those to evaluate on.
        inherited["loss_on"] = inherited.get("loss_on") or (run.effective_config or {}).get("loss_on")
    inherited["extra"] = {
        name: value for name, value in (run.config.get("extra") or {}).items() if f"extra.{name}" not in dropped_fields
    }
    config = merge_config(merge_config(inherited, changes.values), overrides)
    return TrainingConfig.model_validate(drop_unknown_fields(config, user_set_fields | given_fields(overrides)))


def merge_config(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with further values, which replace those of the same field."""
    merged = {**config, **overrides}
    for group in GROUPS:
        # Something else than an object is refused with the other errors.
        if isinstance(config.get(group), Mapping) and isinstance(overrides.get(group), Mapping):
            merged[group] = {**config[group], **overrides[group]}
    return merged


def model_error(code: str, message: str) -> Exception:
    """Create the error of a request whose model cannot be used."""
    return invalid([FieldError(field="model", code=code, message=message)], code=code)


def config_error(name: str, code: str, why: str) -> FieldError:
    """Create an error for a field of the configuration in a request; `why` follows its name."""
    return FieldError(field=f"config.{name}", code=code, message=f"`{name}` {why}.")
