"""Creates runs that evaluate a base model, the output of a run or a checkpoint, without training."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.errors import FieldError
from anneal.contracts.methods import METHODS, Method, RlhfOptions, TrainingMethod, method_of
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.requests import EvaluationCreate, RunCreate
from anneal.contracts.training_config.adapters import CHANGES_BASE
from anneal.contracts.training_config.field_traits import ADAPTER_ONLY, FOUR_BIT_ONLY, NOT_IN_PROBE, SUPERVISED_ONLY
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import (
    GROUPS,
    drop_unknown_fields,
    given_fields,
    named_fields,
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
from app.tables.checkpoints import Checkpoint
from app.tables.datasets import Dataset
from app.tables.runs import Run

_BACKEND = "celery"
_ASKED = frozenset({"loss_on", "max_eval_rows", "seed", "extra.eval_batch_size", "extra.metrics"})
"""Fields that the request may set for weights that a run has trained, beside the options of the method."""
_UNUSED = (NOT_IN_PROBE - _ASKED) | {"optim"}
"""Fields about training and its records, which an evaluation does not read."""


_OF_OTHER_DATA = frozenset(
    {*SUPERVISED_ONLY, "truncation_mode", "batch_size", "gradient_accumulation_steps", "activation_offload",
     "torch_compile", "extra.collator"}
)  # fmt: skip
"""Fields that depend on the data of the method; a run keeps its own only for data of that method."""
_OF_QUANTIZED_ADAPTER = frozenset({*ADAPTER_ONLY, *FOUR_BIT_ONLY, "load_in_4bit", "load_in_8bit"})


@dataclass(frozen=True)
class _Changes:
    """Differences between the configuration of an evaluation and that of the run whose weights it evaluates."""

    values: dict[str, Any]
    """Values as a user would write them."""
    dropped: frozenset[str]
    """Fields, or groups of them, whose values are not those of the run."""

    def kept_fields(self, run: Run) -> set[str]:
        """Return the fields that the user of the run has set and the evaluation keeps."""
        set_fields = set(run.user_set_fields) - _UNUSED
        return {name for name in set_fields if not {name, name.partition(".")[0]} & self.dropped}


@dataclass(frozen=True)
class _Subject:
    """Model to evaluate: a configuration to load it with, and the run that has trained its weights, if any."""

    config: dict[str, Any]
    """Configuration as a user would write it."""
    trained: Run | None = None
    checkpoint: Checkpoint | None = None
    changes: _Changes | None = None
    """Set if there is a run."""


async def create_evaluation(
    transaction: RunTransaction, settings: Settings, storage: Storage, request: EvaluationCreate
) -> Run:
    """Create a run that evaluates a model, or raise 422 with all errors; the same idempotency key returns the same run.

    The data determine the loss. On data that its method trains on, a run is evaluated with its own configuration, so
    the result is that of an evaluation during its training.
    """
    session, caller_id = transaction.session, transaction.caller_id
    if earlier := await find_by_idempotency_key(session, caller_id, transaction.idempotency):
        return earlier
    dataset = await session.get(Dataset, request.dataset_id)
    subject = await _find_subject(session, settings, storage, request, dataset)
    run = subject.trained
    # A configuration with evaluation data must say how often to evaluate. Not validated again: that of a run, with what
    # the request adds, may be longer than one that a request may send.
    run_request = RunCreate.model_construct(
        backend=_BACKEND,
        experiment_id=request.experiment_id,
        dataset_id=request.dataset_id,
        config={**subject.config, "eval_steps": 1},
        resources=request.resources,
    )
    validation = await validate_request(session, settings, storage, run_request, task=RunTask.evaluate)
    validation.errors = [_about_request(error) for error in validation.errors]
    plan = validation.require_plan()
    config, user_set_fields = plan.config, set(plan.user_set_fields) - {"eval_steps"}
    await release_connection(session)
    if run is not None and subject.changes is not None:
        user_set_fields |= subject.changes.kept_fields(run)
        config = await asyncio.to_thread(_as_trained, run, subject.changes, request.config, user_set_fields)
    await _lock_weights(session, request.model)
    await lock_references(session, run_request, plan)
    is_output = run is not None and subject.checkpoint is None
    config = config.model_copy(update={"eval_steps": None})
    plan = replace(
        plan,
        config=config,
        user_set_fields=frozenset(user_set_fields),
        base_run_id=run.id if run is not None and is_output else plan.base_run_id,
    )
    # The estimate is of a training, which takes more memory.
    requirements = build_requirements(plan, least={}, sharded=plan.requires_sharding)
    new = NewRun(
        plan=replace(plan, requirements=requirements),
        experiment_id=request.experiment_id or (await _experiment_id(session, run, caller_id)),
        name=request.name or f"evaluation of {run.name if run else request.model}"[:200],
        tags=request.tags,
        priority=request.priority,
        warnings=validation.warnings,
        parent_run_id=subject.checkpoint.run_id if subject.checkpoint else None,
        resume_checkpoint_id=subject.checkpoint.id if subject.checkpoint else None,
        reason=f"evaluates {request.model}",
    )
    return await insert_run(transaction, new)


def _about_request(error: FieldError) -> FieldError:
    """Return an error by the field of the request in which the value was given."""
    return error.model_copy(update={"field": "model"}) if error.field == "config.base_model" else error


async def _experiment_id(session: AsyncSession, run: Run | None, caller_id: str | None) -> str:
    return run.experiment_id if run else (await default_experiment(session, caller_id)).id


async def _find_subject(
    session: AsyncSession, settings: Settings, storage: Storage, request: EvaluationCreate, dataset: Dataset | None
) -> _Subject:
    """Find the model that the request names; may end the transaction of the session.

    Without `dataset`, which does not exist, the request is refused later.
    """
    run, checkpoint = await _lock_weights(session, request.model)
    if run is None:
        return _Subject(_of_base_model(request, dataset))
    if not BACKEND_RULES[run.backend].loads_model:
        raise _model_error("not_a_model", f"run {run.id} is of backend `{run.backend}`, which trains no model")
    changes = _required_changes(run, dataset, has_output=checkpoint is None)
    if checkpoint is None:
        await release_connection(session)
        await _check_output(settings, storage, run)
    method = changes.values.get("method", run.config["method"])
    refused = sorted(name for name in named_fields(request.config) - _ASKED if not name.startswith(f"{method}."))
    if refused:
        allowed = ", ".join(f"`{name}`" for name in sorted(_ASKED))
        options = f" and `{method}`, which has the options of the loss on these data," if method in GROUPS else ""
        why = f"is that of run {run.id}, which has trained these weights; leave it out: only {allowed}{options} can be "
        why += "set"
        raise invalid([_of_config(name, "not_changeable", why) for name in refused])
    config = without_defaults(run.config, changes.kept_fields(run))
    config.pop("optim", None)  # whether its state can be divided does not matter
    return _Subject(_merge_config(_merge_config(config, changes.values), request.config), run, checkpoint, changes)


def _required_changes(run: Run, dataset: Dataset | None, *, has_output: bool) -> _Changes:
    """Return how the loss that the data determine, and an output that is no adapter, change the configuration.

    With `has_output`, the output is evaluated, otherwise a checkpoint.
    """
    own = method_of(run.config)
    is_merged = has_output and run.config.get("output") == "merged"
    fits = dataset is None or dataset.format in own.formats
    if not fits and own.has_reward_head:
        message = f"run {run.id} has trained a reward model, which writes no text: evaluate it on preference pairs"
        raise _model_error("reward_model_needs_pairs", message)
    values: dict[str, Any] = {}
    dropped: set[str] = set()
    method = own
    if dataset is not None and (not fits or (is_merged and own.adapter == "required")):
        method = _loss_on(dataset)
        values |= {"method": method.name.value, **_data_options(method, dataset)}
        dropped |= set() if fits else {*_OF_OTHER_DATA, own.name.value}
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
                raise _model_error("checkpoint_changes_base", why)
            values["init_lora_weights"] = "default"  # the output has been converted for the unchanged base
    elif is_merged or method is not own:
        dropped |= _OF_QUANTIZED_ADAPTER
        values |= {} if method.adapter == "forbidden" else {"lora_r": None}
    if is_merged and not method.has_reference:
        # It is a model of its own. A reference is the base model, into which the weights are loaded otherwise.
        dropped.add("revision")
        values["base_model"] = run.id
    return _Changes(values, frozenset(dropped - values.keys()))


def _loss_on(dataset: Dataset) -> Method:
    """Return the method whose loss is computed on a dataset for the weights of any method that writes text."""
    return next(
        method
        for method in METHODS.values()
        if dataset.format in method.formats and method.adapter == "optional" and not method.has_reward_head
    )


def _data_options(method: Method, dataset: Dataset) -> dict[str, Any]:
    """Return the options without which a method has no loss on a dataset."""
    if not method.generates:
        return {}
    options = {"batch_size": RlhfOptions().num_generations}
    if "answer" in dataset.columns:
        return {**options, method.name.value: {"rewards": [{"type": "exact_match"}]}}
    return options


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
            raise _model_error("checkpoint_not_found", message)
        if checkpoint.deleted_at is not None or checkpoint.bad_reason is not None:
            why = "was deleted" if checkpoint.deleted_at else f"is corrupt ({checkpoint.bad_reason})"
            raise _model_error("checkpoint_unusable", f"this checkpoint {why}; evaluate another one")
    elif resolver.is_run(model):
        run = await find_locked_run(session, model)
        if run is None:
            raise _model_error("run_not_found", "there is no such run; GET /v1/runs?status=completed lists usable runs")
    return run, checkpoint


async def _check_output(settings: Settings, storage: Storage, run: Run) -> None:
    if run.output_attempt is None:
        message = f"run {run.id} is {run.status} and has no output; {_alternative_to_output(run)}"
        raise _model_error("run_without_output", message)
    try:
        await storage.in_thread(resolver.locate_model, settings, storage, run.id, run.output_attempt)
    except resolver.BaseModelError as error:
        raise _model_error(error.code, error.message) from error


def _alternative_to_output(run: Run) -> str:
    """Return what to evaluate instead of the output of a run."""
    if run.task == RunTask.train:
        return "evaluate one of its checkpoints (`ckpt_…`)"
    subject = run.resume_checkpoint_id or run.base_run_id or run.config["base_model"]
    return f"its task is `{run.task}`, so it has no checkpoints: evaluate {subject}, whose weights these are"


def _of_base_model(request: EvaluationCreate, dataset: Dataset | None) -> dict[str, Any]:
    """Return the configuration that loads a base model as it is: by default unquantized, without an adapter.

    Unless the request names a method, the data determine the loss.
    """
    refused = [
        _of_config(name, "conflict", "is about training, and an evaluation does not train; leave it out")
        for name in sorted(named_fields(request.config) & _UNUSED)
    ]
    if "base_model" in request.config:
        refused.append(_of_config("base_model", "conflict", "is `model`, beside `config`; leave it out"))
    if refused:
        raise invalid(refused)
    config: dict[str, Any] = {"method": TrainingMethod.full.value, **request.config, "base_model": request.model}
    if "method" not in request.config and dataset is not None and dataset.format not in method_of(config).formats:
        method = _loss_on(dataset)
        config = _merge_config({**_data_options(method, dataset), "method": method.name.value}, request.config)
        config["base_model"] = request.model
    if METHODS[method_of(config).name].adapter == "optional":
        config.setdefault("lora_r", None)
    return config


def _as_trained(run: Run, changes: _Changes, overrides: Mapping[str, Any], user_set_fields: set[str]) -> TrainingConfig:
    """Return the configuration of a run without what concerns its training, and with what the request sets."""
    unused = _UNUSED | changes.dropped
    inherited = {name: value for name, value in run.config.items() if name not in unused}
    if "loss_on" not in changes.dropped:
        # The default depends on the data that the run was trained on, not on those to evaluate on.
        inherited["loss_on"] = inherited.get("loss_on") or (run.effective_config or {}).get("loss_on")
    inherited["extra"] = {
        name: value for name, value in (run.config.get("extra") or {}).items() if f"extra.{name}" not in unused
    }
    config = _merge_config(_merge_config(inherited, changes.values), overrides)
    return TrainingConfig.model_validate(drop_unknown_fields(config, user_set_fields | given_fields(overrides)))


def _merge_config(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with further values, which replace those of the same field."""
    merged = {**config, **overrides}
    for group in GROUPS:
        # Something else than an object is refused with the other errors.
        if isinstance(config.get(group), Mapping) and isinstance(overrides.get(group), Mapping):
            merged[group] = {**config[group], **overrides[group]}
    return merged


def _model_error(code: str, message: str) -> Exception:
    return invalid([FieldError(field="model", code=code, message=message)], code=code)


def _of_config(name: str, code: str, why: str) -> FieldError:
    return FieldError(field=f"config.{name}", code=code, message=f"`{name}` {why}.")
