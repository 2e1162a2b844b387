"""Creates runs that evaluate a base model, the output of a run or a checkpoint, without training."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.dependencies import release
from app.api.errors import invalid
from app.base_models import resolver
from app.config import Settings
from app.contracts.backends import BACKEND_RULES
from app.contracts.errors import FieldError
from app.contracts.methods import METHODS, TrainingMethod, method_of
from app.contracts.run_task import RunTask
from app.contracts.schemas.runs.requests import EvaluationCreate, RunCreate
from app.contracts.training_config.field_traits import NOT_IN_PROBE
from app.contracts.training_config.fields import TrainingConfig
from app.contracts.training_config.raw_config import drop_unknown_fields, given_fields, named_fields
from app.infra.ids import is_id, new_id
from app.infra.storage import Storage
from app.runs.creation import RunTransaction, default_experiment, find_by_idempotency_key, insert
from app.runs.resume import without_defaults
from app.runs.validation.request import is_divided, lock_references, requirements, validate_request
from app.runs.validation.result import validation_failed
from app.runs.validation.rewards import reward_problems
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run

_BACKEND = "celery"
_ASKED = frozenset({"max_eval_rows", "seed", "extra.eval_batch_size", "extra.metrics"})
"""Fields that the request may set for weights that a run has trained; the others are those of that run."""
_UNUSED = (NOT_IN_PROBE - _ASKED) | {"optim"}
"""Fields about training and its records, which an evaluation does not read."""


@dataclass(frozen=True)
class _Subject:
    """Model to evaluate: a configuration to load it with, and the run that has trained its weights, if any."""

    config: dict[str, Any]
    """Configuration as a user would write it."""
    trained: Run | None = None
    checkpoint: Checkpoint | None = None


async def evaluate(transaction: RunTransaction, settings: Settings, storage: Storage, request: EvaluationCreate) -> Run:
    """Create a run that evaluates a model, or raise 422 with all errors; the same idempotency key returns the same run.

    Weights that a run has trained are evaluated with the configuration of that run, so the result is that of an
    evaluation during its training.
    """
    session, caller_id = transaction.session, transaction.caller_id
    wrong_rewards = await reward_problems(settings, request.config)
    if earlier := await find_by_idempotency_key(session, caller_id, transaction.idempotency):
        return earlier
    subject = await _subject(session, settings, storage, request)
    run = subject.trained
    # A configuration with evaluation data must say how often to evaluate. Not validated again: that of a run, with what
    # the request adds, may be longer than one that a request may send.
    wanted = RunCreate.model_construct(
        backend=_BACKEND,
        experiment_id=request.experiment_id,
        dataset_id=request.dataset_id,
        config={**subject.config, "eval_steps": 1},
        resources=request.resources,
    )
    found = await validate_request(session, settings, storage, wanted, wrong_rewards, task=RunTask.evaluate)
    if found.errors or found.config is None:
        raise validation_failed([_about_request(error) for error in found.errors])
    config, given = found.config, set(found.given) - {"eval_steps"}
    await release(session)
    if run is not None:
        given |= set(run.user_set_fields) - _UNUSED
        config = await asyncio.to_thread(_as_trained, run, request.config, given)
    await lock_references(session, wanted, found)
    await _lock_weights(session, request.model)
    values = {
        "id": new_id("run"),
        "task": RunTask.evaluate,
        "experiment_id": request.experiment_id or (await _experiment_id(session, run, caller_id)),
        "name": request.name or f"evaluation of {run.name if run else request.model}"[:200],
        "tags": request.tags,
        "backend": _BACKEND,
        "dataset_id": request.dataset_id,
        "config": config.model_copy(update={"eval_steps": None}).model_dump(mode="json"),
        "user_set_fields": sorted(given),
        "warnings": found.stored_warnings,
        "devices_needed": found.resources.devices,
        "hosts_needed": found.resources.hosts,
        "resources": found.resources.model_dump(),
        # The estimate is of a training, which takes more memory.
        "requirements": requirements(
            BACKEND_RULES[_BACKEND], config, given, found.resources, least={}, sharded=is_divided(found.resources)
        ),
        "priority": request.priority,
        "base_run_id": found.base_run_id,
    }
    if subject.checkpoint is not None:
        values |= {"parent_run_id": subject.checkpoint.run_id, "resume_checkpoint_id": subject.checkpoint.id}
    elif run is not None:
        values["base_run_id"] = run.id
    return await insert(transaction, values, f"evaluates {request.model}", found.reward_run_ids)


def _about_request(error: FieldError) -> FieldError:
    """Return an error by the field of the request in which the value was given."""
    return error.model_copy(update={"field": "model"}) if error.field == "config.base_model" else error


async def _experiment_id(session: AsyncSession, run: Run | None, caller_id: str | None) -> str:
    return run.experiment_id if run else (await default_experiment(session, caller_id)).id


async def _subject(session: AsyncSession, settings: Settings, storage: Storage, request: EvaluationCreate) -> _Subject:
    """Find the model that the request names; may end the transaction of the session."""
    run, checkpoint = await _lock_weights(session, request.model)
    if run is None:
        return _Subject(_of_base_model(request))
    if not BACKEND_RULES[run.backend].loads_model:
        raise _refused("not_a_model", f"run {run.id} is of backend `{run.backend}`, which trains no model")
    if (run.config.get("extra") or {}).get("recipe"):
        message = f"run {run.id} was trained by a recipe of a plugin, which only that recipe can evaluate"
        raise _refused("trained_by_a_recipe", message)
    if checkpoint is None and run.config.get("output") == "merged":
        why = f"the output of run {run.id} is merged into its base model; {_instead(run)}"
        raise _refused("merged_output", why)
    if checkpoint is None:
        await release(session)
        await _check_output(settings, storage, run)
    refused = sorted(named_fields(request.config) - _ASKED)
    if refused:
        allowed = ", ".join(f"`{name}`" for name in sorted(_ASKED))
        why = f"is that of run {run.id}, which has trained these weights; leave it out: only {allowed} can be set"
        raise invalid([_of_config(name, "not_changeable", why) for name in refused])
    given = set(run.user_set_fields) - _UNUSED
    config = without_defaults(run.config, given)
    config.pop("optim", None)  # whether its state can be divided does not matter
    return _Subject(_merged(config, request.config), run, checkpoint)


async def _lock_weights(session: AsyncSession, model: str) -> tuple[Run | None, Checkpoint | None]:
    """Return the run and the checkpoint that `model` names, if any, locked against deletion until the commit."""
    run = checkpoint = None
    if is_id(model, "ckpt"):
        # In the order in which the deletion of a run locks both: the run first.
        owner = await session.scalar(select(Checkpoint.run_id).where(Checkpoint.id == model))
        run = await _locked(session, owner) if owner else None
        query = select(Checkpoint).where(Checkpoint.id == model).with_for_update(read=True)
        checkpoint = await session.scalar(query.execution_options(populate_existing=True))
        if checkpoint is None:
            message = "there is no such checkpoint; GET /v1/runs/{id}/checkpoints lists them"
            raise _refused("checkpoint_not_found", message)
        if checkpoint.deleted_at is not None or checkpoint.bad_reason is not None:
            why = "was deleted" if checkpoint.deleted_at else f"is corrupt ({checkpoint.bad_reason})"
            raise _refused("checkpoint_unusable", f"this checkpoint {why}; evaluate another one")
    elif resolver.is_run(model):
        run = await _locked(session, model)
        if run is None:
            raise _refused("run_not_found", "there is no such run; GET /v1/runs?status=completed lists usable runs")
    return run, checkpoint


async def _check_output(settings: Settings, storage: Storage, run: Run) -> None:
    if run.output_attempt is None:
        message = f"run {run.id} is {run.status} and has no output; {_instead(run)}"
        raise _refused("run_without_output", message)
    try:
        await storage.in_thread(resolver.locate, settings, storage, run.id, run.output_attempt)
    except resolver.BaseModelError as error:
        raise _refused(error.code, error.message) from error


def _instead(run: Run) -> str:
    """Return what to evaluate instead of the output of a run."""
    if run.task == RunTask.train:
        return "evaluate one of its checkpoints (`ckpt_…`)"
    subject = run.resume_checkpoint_id or run.base_run_id or run.config["base_model"]
    return f"its task is `{run.task}`, so it has no checkpoints: evaluate {subject}, whose weights these are"


def _of_base_model(request: EvaluationCreate) -> dict[str, Any]:
    """Return the configuration that loads a base model as it is: by default unquantized, without an adapter."""
    refused = [
        _of_config(name, "conflict", "is about training, and an evaluation does not train; leave it out")
        for name in sorted(named_fields(request.config) & _UNUSED)
    ]
    if "base_model" in request.config:
        refused.append(_of_config("base_model", "conflict", "is `model`, beside `config`; leave it out"))
    if refused:
        raise invalid(refused)
    config = {"method": TrainingMethod.full.value, **request.config, "base_model": request.model}
    if METHODS[method_of(config).name].adapter == "optional":
        config.setdefault("lora_r", None)
    return config


def _as_trained(run: Run, asked: Mapping[str, Any], given: set[str]) -> TrainingConfig:
    """Return the configuration of a run without what concerns its training, and with what the request sets."""
    kept = {name: value for name, value in run.config.items() if name not in _UNUSED}
    # The default depends on the data that the run was trained on, not on those to evaluate on.
    kept["loss_on"] = kept.get("loss_on") or (run.effective_config or {}).get("loss_on")
    kept["extra"] = {
        name: value for name, value in (run.config.get("extra") or {}).items() if f"extra.{name}" not in _UNUSED
    }
    return TrainingConfig.model_validate(drop_unknown_fields(_merged(kept, asked), given | given_fields(asked)))


def _merged(config: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    extra = asked.get("extra")
    # Something else than an object is refused with the other errors.
    both = {**config.get("extra", {}), **extra} if isinstance(extra, Mapping) else extra
    return {**config, **asked, **({"extra": both} if "extra" in asked else {})}


async def _locked(session: AsyncSession, run_id: str) -> Run | None:
    query = select(Run).where(Run.id == run_id).with_for_update(read=True, key_share=True)
    return await session.scalar(query)


def _refused(code: str, message: str) -> Exception:
    return invalid([FieldError(field="model", code=code, message=message)], code=code)


def _of_config(name: str, code: str, why: str) -> FieldError:
    return FieldError(field=f"config.{name}", code=code, message=f"`{name}` {why}.")
