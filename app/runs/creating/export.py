"""Exports of checkpoints, each a run of its own."""

from typing import Any

from pydantic import ValidationError

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.errors import FieldError
from anneal.contracts.run_status import TERMINAL
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.checkpoints import CheckpointExport
from anneal.contracts.schemas.runs.placement import Resources
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import drop_unknown_fields
from anneal.contracts.training_config.rules import gguf_conflicts, wants_adapter
from anneal.contracts.training_config.validation import config_errors
from app.api.errors import conflict, invalid
from app.config import Settings
from app.runs.creating.creation import RunTransaction, find_by_idempotency_key, insert_run
from app.runs.creating.plan import NewRun, RunPlan
from app.runs.creating.requirements import gguf_requirements
from app.runs.creating.validation.backends import unavailable_reason
from app.runs.creating.validation.destinations import gguf_problems
from app.runs.state import service
from app.runs.state.checkpoints.service import get_checkpoint
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run

_OPTIMIZER_OPTIONS = frozenset({"optim_args", "optim_target_modules", "optimizer"})
"""Fields of `extra` about the optimizer, of this version and of earlier ones."""


async def create_export(
    transaction: RunTransaction, settings: Settings, run_id: str, checkpoint_id: str, request: CheckpointExport
) -> Run:
    """Create a run that writes the weights of a checkpoint as its output; the same idempotency key returns the same.

    Raises 404 without such a checkpoint, 409 while its run is live (`run_is_live`) or if it is corrupt
    (`checkpoint_unusable`), 422 for an output that the run cannot have.
    """
    session = transaction.session
    if earlier := await find_by_idempotency_key(session, transaction.caller_id, transaction.idempotency):
        return earlier
    # Locked, so that this and the deletion of the run or its checkpoints wait for each other.
    source = await service.lock_run(session, run_id, for_child=True)
    checkpoint = await get_checkpoint(session, source.id, checkpoint_id)
    _refuse_if_impossible(settings, source, checkpoint)
    config, user_set_fields = _export_config(source, request)
    if config.gguf is not None and (
        refused := gguf_conflicts(config) or await gguf_problems(session, settings, config.gguf)
    ):
        raise invalid(refused)
    alone = {"devices": 1, "hosts": 1, "sequence_parallel": 1, "expert_parallel": 1}
    plan = RunPlan.derived_from(
        source,
        config=config,
        user_set_fields=user_set_fields,
        resources=Resources.model_validate(source.resources | alone),
        requirements=_export_requirements(source, config),
        task=RunTask.export,
        extra_eval_datasets=await service.extra_eval_datasets(session, source),
    )
    new = NewRun.derived_from(
        source,
        plan,
        name=request.name or f"step {checkpoint.step} of {source.name}"[:200],
        checkpoint=checkpoint,
        reason=f"exports the checkpoint of step {checkpoint.step} of {source.id}",
    )
    return await insert_run(transaction, new)


def _refuse_if_impossible(settings: Settings, source: Run, checkpoint: Checkpoint) -> None:
    """Raise the reason why no run can export a checkpoint of this run."""
    rules = BACKEND_RULES[source.backend]
    if why := unavailable_reason(settings, rules):
        raise invalid([FieldError(field="checkpoint_id", code="backend_not_configured", message=why)])
    if not rules.loads_model:
        message = f"run {source.id} is of backend `{source.backend}`, whose checkpoints contain no model to export"
        raise invalid([FieldError(field="checkpoint_id", code="not_supported", message=message)])
    if source.task == RunTask.predict:
        message = f"run {source.id} is a prediction, whose checkpoints contain answers and no weights"
        raise invalid([FieldError(field="checkpoint_id", code="not_supported", message=message)])
    if source.status not in TERMINAL:
        raise conflict(
            "run_is_live",
            f"Run {source.id} is {source.status}, and may replace this checkpoint; only those of a run that has ended "
            "can be exported: wait, or stop it first.",
        )
    if checkpoint.bad_reason is not None:
        raise conflict(
            "checkpoint_unusable",
            f"Checkpoint {checkpoint.id} is corrupt ({checkpoint.bad_reason}); export another one of the run.",
        )


def _export_config(source: Run, request: CheckpointExport) -> tuple[TrainingConfig, frozenset[str]]:
    """Return the configuration of a run with the output that the request asks for, and the fields that a user set."""
    user_set_fields = set(source.user_set_fields) - {"push_to_hub", "report_to"}
    changed: dict[str, Any] = {"push_to_hub": None, "report_to": []}
    if request.output is not None:
        user_set_fields.add("output")
        changed["output"] = request.output
    if request.gguf is not None or request.output == "adapter":
        user_set_fields = user_set_fields | {"gguf"} if request.gguf is not None else user_set_fields - {"gguf"}
        changed["gguf"] = request.gguf
    user_set_fields -= {"optim", *(f"extra.{name}" for name in _OPTIMIZER_OPTIONS)}
    stored = drop_unknown_fields(_without_optimizer({**source.config, **changed}), user_set_fields)
    try:
        config = TrainingConfig.model_validate(stored)
        config.trainer_options  # noqa: B018 - validates `extra`
    except ValidationError as error:  # values that another version accepted
        names = {prefix + str(problem["loc"][0]) for problem in error.errors() for prefix in ("", "extra.")}
        errors = config_errors(stored, has_eval_dataset=source.eval_dataset_id is not None)
        raise invalid(
            [problem for problem in errors if {problem.field, problem.field.partition(".")[0]} & names]
        ) from error
    if request.output is not None and not wants_adapter(config):
        message = "applies only to adapters, and this run trained all weights; leave it out"
        raise invalid([FieldError(field="output", code="conflict", message=message)])
    if request.gguf is not None and request.output is None and wants_adapter(config):
        user_set_fields.add("output")
        config = config.model_copy(update={"output": "merged"})
    return config, frozenset(user_set_fields)


def _without_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without its optimizer, which an export does not use and which may no longer exist."""
    extra = {name: value for name, value in (config.get("extra") or {}).items() if name not in _OPTIMIZER_OPTIONS}
    return {name: value for name, value in config.items() if name != "optim"} | {"extra": extra}


def _export_requirements(source: Run, config: TrainingConfig) -> dict[str, Any]:
    """Return the requirements of the run that was trained, with what the export writes."""
    requirements = {
        name: value
        for name, value in source.requirements.items()
        if name not in ("gguf", "gguf_quantizer", "sharded", "sequence_parallel", "expert_parallel")
    }
    return requirements | gguf_requirements(config)
