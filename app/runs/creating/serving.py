"""Finds or creates the serving run that answers questions to a model.

A serving run loads one base model. Adapters on it, which are outputs or checkpoints of runs, are loaded beside it when
a question names them; an output that is a whole model is a base model of its own. Any other checkpoint, and an adapter
that takes no others beside it, has a serving run of its own, which loads it as a prediction does.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import ColumnElement, Select, and_, func, literal_column, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.errors import FieldError
from anneal.contracts.methods import Method, method_of
from anneal.contracts.run_status import LIVE
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.placement import PendingReason, ResourceRequest
from anneal.contracts.schemas.runs.requests import InferenceCreate, RunCreate
from anneal.contracts.training_config.adapters import CHANGES_BASE
from anneal.contracts.training_config.field_traits import FOUR_BIT_ONLY
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import without_defaults
from app.api.errors import RETRY_SECONDS, ApiError, invalid
from app.base_models import resolver
from app.config import Settings
from app.infra.ids import is_id
from app.infra.storage import Storage
from app.runs.creating.creation import RunTransaction, default_experiment, insert_run
from app.runs.creating.inference import Changes, Inference, plan_inference
from app.runs.creating.plan import NewRun
from app.runs.creating.prediction import answering_changes
from app.runs.creating.requirements import build_requirements
from app.runs.creating.validation.request import lock_references, validate_request
from app.runs.queue.fit import Needs, pause_reason, pending_reason
from app.runs.queue.fleet import read_fleet
from app.tables.base import sql_list
from app.tables.checkpoints import Checkpoint
from app.tables.datasets import Dataset
from app.tables.runs import Run

PRIORITY = -1001
"""Priority of serving runs, below all that a request can set: whatever waits for a device comes before them."""
_BACKEND = "celery"
_TURN = 0x73657276
"""Advisory lock ("serv") under which the runs of all models are created, so that two questions do not create two."""
_OF_MODEL = frozenset({"dtype", "attn_implementation", "extra.model_factory"})
"""Fields of a run that determine how the model of its output is loaded."""
_OF_BASE = _OF_MODEL | {"base_model", "revision", "tokenizer", "extra.tokenizer", "load_in_8bit", *FOUR_BIT_ONLY}
"""Those for the base of its adapter."""
_OF_QUANTIZATION = frozenset({"load_in_8bit", *FOUR_BIT_ONLY})


@dataclass(frozen=True)
class ServedModel:
    """Model as a serving run answers for it."""

    config: Mapping[str, Any]
    """Configuration of the serving run, as a user would write it."""
    adapter: str | None = None
    """Run or checkpoint that is the adapter; None: the base model itself answers."""
    weights: str | None = None
    """Run or checkpoint whose weights a serving run of its own loads; `config` is that of the run then."""
    adapter_folder: Path | None = None
    """Folder of the adapter in the storage."""
    adapter_fields: frozenset[str] = frozenset()
    """Fields of the configuration that the user has set in the run which has trained the adapter."""

    @property
    def is_answered_by(self) -> ColumnElement[bool]:
        """Condition that a serving run answers for the model: it has its weights, or its configuration."""
        if self.weights is not None and is_id(self.weights, "ckpt"):
            return Run.resume_checkpoint_id == self.weights
        if self.weights is not None:
            # That of a base model which is the output of a run has both.
            return and_(Run.base_run_id == self.weights, Run.base_model != self.weights)
        stored = TrainingConfig.model_validate(self.config).model_dump(mode="json")
        return and_(Run.resume_checkpoint_id.is_(None), Run.config == stored)


async def find_model(session: AsyncSession, settings: Settings, storage: Storage, name: str) -> ServedModel:
    """Find what answers for a model: a base model, the output of a run by its id or name, or a checkpoint.

    Raises 404 if there is no such run or checkpoint, 422 if it writes no text. A base model may not exist.
    """
    if is_id(name, "ckpt"):
        return await _find_checkpoint(session, storage, name)
    if resolver.is_run(name):
        run = await session.get(Run, name)
    else:
        is_base = await storage.in_thread(_is_base_model, settings, name)
        run = None if is_base else await _find_named_run(session, name)
    if run is None:
        if resolver.is_run(name):
            raise model_not_found(f"There is no run {name}; GET /v1/runs?status=completed lists usable runs.")
        try:
            resolver.check_allowed(settings, name)
        except resolver.BaseModelError as error:
            raise model_refused(error.code, error.message) from error
        return ServedModel(_base_config(name))
    _refuse_other_runs(run)
    if run.output_attempt is None:
        raise model_refused("run_without_output", f"Run {run.id} is {run.status} and has no output: use a checkpoint.")
    method = method_of(run.config)
    if method.trains_adapter(run.config["lora_r"]) and run.config.get("output") != "merged":
        config = _loading_config(run, method, _OF_BASE)
        if _is_alone(run):
            return ServedModel(config, weights=run.id)
        return _adapter_model(config, run, run.id, storage.output_dir(run.id, run.output_attempt))
    return ServedModel(_loading_config(run, method, _OF_MODEL) | {"base_model": run.id})


async def find_or_create_serving_run(
    transaction: RunTransaction,
    settings: Settings,
    storage: Storage,
    model: ServedModel,
    reason_for_run: str | None = None,
) -> tuple[Run, bool]:
    """Return the serving run of a model, and True if it is new; the caller commits, and then notifies workers.

    `reason_for_run` says in the first event of a new run why nothing else answers. Raises 404 or 422 if the model
    cannot be loaded, 503 with the reason if no worker can take a new run.
    """
    session = transaction.session
    try:
        is_answered_by = model.is_answered_by
    except ValidationError:
        raise model_not_found("There is no such model; GET /openai/v1/models lists base models and outputs.") from None
    if (run := await session.scalar(_open_runs(is_answered_by))) is not None:
        return run, False
    if model.weights is None:
        new = await _plan_base(session, settings, storage, model, transaction.caller_id)
    else:
        request = InferenceCreate.model_construct(model=model.weights, priority=PRIORITY)
        new = await plan_inference(session, settings, storage, _WeightsServing(request), transaction.caller_id)
    if reason_for_run is not None:
        new = replace(new, reason=f"{new.reason}, and {reason_for_run}")
    if (reason := await _reason_not_to_start(session, settings, new.plan.requirements)) is not None:
        raise no_device(reason)
    await session.execute(select(func.pg_advisory_xact_lock(_TURN)))
    if (run := await session.scalar(_open_runs(is_answered_by))) is not None:
        return run, False
    return await insert_run(transaction, new), True


async def _plan_base(
    session: AsyncSession, settings: Settings, storage: Storage, model: ServedModel, caller_id: str | None
) -> NewRun:
    """Return the serving run of a base model to insert, with the rows that it refers to locked."""
    # Not validated again: it is made of a configuration that was.
    request = RunCreate.model_construct(
        backend=_BACKEND,
        experiment_id=None,
        dataset_id=None,  # type: ignore[arg-type]
        config=dict(model.config),
        resources=ResourceRequest(),
    )
    validation = await validate_request(session, settings, storage, request, task=RunTask.serve)
    if validation.errors:
        raise _about_model(validation.errors[0])
    plan = validation.require_plan()
    await lock_references(session, request, plan)
    return NewRun(
        # Its memory is not estimated: the estimate is of a training, which takes more.
        plan=replace(plan, requirements=build_requirements(plan, least={})),
        experiment_id=(await default_experiment(session, caller_id)).id,
        name=f"answers of {plan.config.base_model}"[:200],
        priority=PRIORITY,
        warnings=validation.warnings,
        reason="a question to its model has come",
    )


class _WeightsServing(Inference):
    """Answers of weights that have a serving run of their own."""

    task = RunTask.serve
    noun = "answers"
    reason = "a question has come to"

    def base_config(self, dataset: Dataset | None) -> dict[str, Any]:
        raise NotImplementedError  # these are of a run

    def changes_of(self, run: Run, dataset: Dataset | None, *, has_output: bool) -> Changes:
        return answering_changes(run, has_output=has_output)

    def overrides(self, run: Run, changes: Changes) -> Mapping[str, Any]:
        return {"max_seq_length": None}


def model_not_found(message: str) -> ApiError:
    """Create the error of a question to a model that does not exist, as OpenAI's clients know it."""
    error = FieldError(field="model", code="model_not_found", message=message)
    return ApiError(404, "model_not_found", message, [error])


def model_refused(code: str, message: str) -> ApiError:
    """Create the error of a question to a model that cannot answer."""
    return invalid([FieldError(field="model", code=code, message=message)], message, code)


def no_device(reason: PendingReason) -> ApiError:
    """Create the error of a question that no worker can answer now."""
    return ApiError(503, reason.code, reason.message, headers={"Retry-After": str(RETRY_SECONDS)})


def _open_runs(is_answered_by: ColumnElement[bool]) -> Select[Run]:
    """Select the serving run of a model that has not been asked to end, the oldest of several."""
    # Literals, from which PostgreSQL concludes that it need not read the many other runs that wait: by their priority,
    # and by the index of those that are live.
    waits = and_(text("runs.status = 'pending'"), literal_column("runs.priority") <= literal_column(str(PRIORITY)))
    is_open = or_(waits, text(f"runs.status IN {sql_list(LIVE)}"))
    query = select(Run).where(is_open, Run.task == RunTask.serve, Run.stop_requested_at.is_(None), is_answered_by)
    return query.order_by(Run.id).limit(1)


def _is_base_model(settings: Settings, name: str) -> bool:
    """Return True if a folder below a models root has the name; that of a hub model may also be that of a run."""
    try:
        return resolver.folder_of(settings, name).is_dir()
    except resolver.BaseModelError:
        return False


async def _find_named_run(session: AsyncSession, name: str) -> Run | None:
    """Return the newest run of this name with an output."""
    query = select(Run).where(Run.name == name, Run.output_attempt.is_not(None)).order_by(Run.id.desc()).limit(1)
    return await session.scalar(query.where(Run.task.in_([RunTask.train, RunTask.export])))


async def _find_checkpoint(session: AsyncSession, storage: Storage, checkpoint_id: str) -> ServedModel:
    checkpoint = await session.get(Checkpoint, checkpoint_id)
    run = await session.get(Run, checkpoint.run_id) if checkpoint is not None else None
    if checkpoint is None or run is None:
        raise model_not_found(f"There is no checkpoint {checkpoint_id}; GET /v1/runs/{{id}}/checkpoints lists them.")
    if checkpoint.deleted_at is not None or checkpoint.bad_reason is not None:
        why = "was deleted" if checkpoint.deleted_at else f"is corrupt ({checkpoint.bad_reason})"
        raise model_refused("checkpoint_unusable", f"Checkpoint {checkpoint_id} {why}: use another one.")
    _refuse_other_runs(run)
    method = method_of(run.config)
    config = _loading_config(run, method, _OF_BASE)
    has_changed_base = run.config.get("init_lora_weights") in CHANGES_BASE
    if not method.trains_adapter(run.config["lora_r"]) or has_changed_base or _is_alone(run):
        return ServedModel(config, weights=checkpoint_id)
    folder = storage.named_checkpoint(run.id, checkpoint.attempt, checkpoint.name)
    return _adapter_model(config, run, checkpoint_id, folder)


def _is_alone(run: Run) -> bool:
    """Return True if the adapter of a run takes no others beside it: peft loads one with single tokens alone."""
    return bool(run.config.get("trainable_token_indices"))


def _adapter_model(config: Mapping[str, Any], run: Run, adapter: str, folder: Path) -> ServedModel:
    fields = frozenset(run.user_set_fields)
    return ServedModel(config, adapter=adapter, adapter_folder=folder, adapter_fields=fields)


def _refuse_other_runs(run: Run) -> None:
    """Raise 422 for a run that has trained no model which writes text."""
    if not BACKEND_RULES[run.backend].loads_model or run.task not in (RunTask.train, RunTask.export):
        raise model_refused("not_a_model", f"Run {run.id} has trained no model: name one that has, or a base model.")
    if method_of(run.config).has_reward_head:
        raise model_refused("reward_model", f"Run {run.id} has trained a reward model, which writes no text.")


def _base_config(name: str) -> dict[str, Any]:
    # A method with an adapter: the base is then loaded as it computes, and not as its weights are trained.
    return {"method": "lora", "base_model": name, "max_seq_length": None}


def _loading_config(run: Run, method: Method, fields: Collection[str]) -> dict[str, Any]:
    """Return the configuration that loads the model of a run, of those of its own `fields` that its user has set."""
    is_quantized = method.quantization != "forbidden" and (run.config["load_in_4bit"] or run.config["load_in_8bit"])
    if not is_quantized:
        fields = {*fields} - _OF_QUANTIZATION
    loading_fields = {name: value for name, value in run.config.items() if name in fields or name == "extra"}
    user_set_fields = {name for name in run.user_set_fields if name in fields}
    config = without_defaults(
        {**loading_fields, "lora_r": run.config["lora_r"], "method": method.name}, user_set_fields
    )
    is_of_base = is_quantized and "base_model" in fields
    return {**_base_config(run.base_model), **config, "method": "qlora" if is_of_base else "lora"}


async def _reason_not_to_start(
    session: AsyncSession, settings: Settings, requirements: Mapping[str, Any]
) -> PendingReason | None:
    fleet = await read_fleet(session, settings.lease_seconds)
    if fleet.pause is not None:
        return pause_reason(fleet.pause)
    return pending_reason(Needs.of(_BACKEND, 1, 1, requirements), fleet)


def _about_model(error: FieldError) -> ApiError:
    if error.code.endswith("not_found"):
        return model_not_found(error.message)
    return model_refused(error.code, error.message)
