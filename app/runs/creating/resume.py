"""Resumes a run that has ended, as a new run."""

import asyncio
import math
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.errors import FieldError
from anneal.contracts.run_status import TERMINAL
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.placement import MOST_DEVICES, ResourceRequest, Resources
from anneal.contracts.schemas.runs.requests import RunResume
from anneal.contracts.training_config.fields import MOST_MICRO_BATCHES, MOST_STEPS, TrainingConfig
from anneal.contracts.training_config.optimizers import SHARDED_OPTIMIZERS
from anneal.contracts.training_config.raw_config import (
    drop_unknown_fields,
    given_fields,
    named_fields,
    without_defaults,
)
from anneal.contracts.training_config.validation import resume_problems
from app.api.dependencies import release_connection
from app.api.errors import ApiError, conflict, invalid
from app.config import Settings
from app.infra.ids import is_id
from app.infra.storage import Storage
from app.runs.creating.creation import RunTransaction, find_by_idempotency_key, find_locked_run, insert_run
from app.runs.creating.estimates.inputs import Subject, read_data
from app.runs.creating.estimates.service import with_sharding
from app.runs.creating.plan import NewRun, RunPlan
from app.runs.creating.requirements import build_requirements, estimate_requirements
from app.runs.creating.validation.backends import backend_problems
from app.runs.creating.validation.config import about_config, config_problems, unusual_warnings
from app.runs.creating.validation.destinations import destination_problems
from app.runs.creating.validation.resources import (
    check_resources,
    label_problems,
    placement_problems,
    use_all_devices,
)
from app.runs.creating.validation.result import validation_failed
from app.runs.state import service
from app.runs.state.actions.service import read_config_changes
from app.runs.state.checkpoints.service import furthest_good, preferred_checkpoint
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run
from app.workers.online import read_online_workers


async def resume_run(
    transaction: RunTransaction, settings: Settings, storage: Storage, run_id: str, request: RunResume
) -> Run:
    """Create a run that continues `run_id` from a checkpoint; the same idempotency key returns the same run.

    Raises 409 while the run is live (`run_is_live`), without a checkpoint (`no_checkpoint`) or for a run that does not
    train (`not_a_training`), 422 for changes that cannot be made (`not_changeable_on_resume`) and when no step is left
    (`nothing_left_to_train`).
    """
    session = transaction.session
    if earlier := await find_by_idempotency_key(session, transaction.caller_id, transaction.idempotency):
        return earlier
    parent = await _lock_ended_run(session, run_id)
    _refuse_changes_of_prediction(parent, request)
    sent = await destination_problems(session, settings, {**parent.config, **request.config})
    changed = {} if request.from_ == "start" else await read_config_changes(session, parent.id)
    await release_connection(session)
    config, user_set_fields = await asyncio.to_thread(_merge_configuration, parent, changed, request, sent)
    checkpoint = await _choose_checkpoint(session, storage, parent, request)
    if request.stop_after_steps is not None:
        last = min((checkpoint.step if checkpoint else 0) + request.stop_after_steps, MOST_STEPS)
        config = config.model_copy(update={"stop_at_step": last})
        user_set_fields = user_set_fields | {"stop_at_step"}
    if checkpoint is not None:
        _refuse_if_done(parent, config, checkpoint)
        if parent.requirements.get("sharded"):
            config, user_set_fields = _with_the_same_optimizer(config, user_set_fields)
    plan = await _plan_resumed(session, settings, storage, parent, request, config, user_set_fields, checkpoint)
    await _lock_ended_run(session, run_id)  # locked again: no connection was held while threads worked
    if checkpoint is not None:
        checkpoint = await _find_checkpoint(session, parent, checkpoint.id)
    # The insertion would lock these older runs in another order.
    await service.lock_runs(session, {*plan.reward_run_ids, plan.base_run_id}, for_child=True)
    new = NewRun.derived_from(
        parent,
        plan,
        warnings=unusual_warnings(plan.config),
        checkpoint=checkpoint,
        of_weights=await _weights_of_prediction(session, parent),
        reason=f"resumes {parent.id} " + (f"from step {checkpoint.step}" if checkpoint else "from the start"),
    )
    return await insert_run(transaction, new)


def _refuse_changes_of_prediction(parent: Run, request: RunResume) -> None:
    """Refuse what a resumed prediction cannot change: one half of its answers would differ from the other."""
    if parent.task != RunTask.predict:
        return
    names = [f"config.{name}" for name in sorted(request.config)]
    names += [] if request.stop_after_steps is None else ["stop_after_steps"]
    names += [] if request.resources is None or request.resources.devices == 1 else ["resources.devices"]
    message = "cannot change when a prediction is resumed; create a new prediction with other values"
    if parent.status == "completed" and request.from_ is None:
        what = f"Run {parent.id} has answered all rows; send" + ' {"from": "start"} to answer them again.'
        raise ApiError(422, "nothing_left_to_train", what)
    if names:
        raise invalid([FieldError(field=name, code="not_changeable_on_resume", message=message) for name in names])


async def _weights_of_prediction(session: AsyncSession, run: Run | None) -> str | None:
    """Return the checkpoint with whose weights a prediction answers; None for an output or another task."""
    while run is not None and run.task == RunTask.predict and run.resume_checkpoint_id is not None:
        checkpoint = await session.get(Checkpoint, run.resume_checkpoint_id)
        owner = await session.get(Run, checkpoint.run_id) if checkpoint else None
        if owner is not None and owner.task != RunTask.predict:
            return run.resume_checkpoint_id
        run = owner  # it was resumed
    return None


async def _choose_checkpoint(
    session: AsyncSession, storage: Storage, parent: Run, request: RunResume
) -> Checkpoint | None:
    """Return the checkpoint from which the request resumes a run; None: from the start."""
    starts = {"checkpoint_id": request.checkpoint_id, "checkpoint_path": request.checkpoint_path, "from": request.from_}
    chosen = [name for name, value in starts.items() if value is not None]
    if len(chosen) > 1:
        message = f"cannot be given together with `{chosen[1]}`; choose one"
        raise invalid([FieldError(field=chosen[0], code="conflict", message=message)])
    if request.from_ == "start":
        return None
    if request.checkpoint_path is not None:
        checkpoint_id = await _checkpoint_at(session, storage, request.checkpoint_path)
        return await _find_checkpoint(session, parent, checkpoint_id, "checkpoint_path")
    return await _find_checkpoint(session, parent, request.checkpoint_id)


async def _plan_resumed(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    parent: Run,
    request: RunResume,
    config: TrainingConfig,
    user_set_fields: frozenset[str],
    checkpoint: Checkpoint | None,
) -> RunPlan:
    """Plan a run that continues another one on the same devices, or those that the request changes them to."""
    rules, before = BACKEND_RULES[parent.backend], Resources.model_validate(parent.resources)
    requested = ResourceRequest.model_validate(
        before.model_dump() | (request.resources.model_dump(exclude_unset=True) if request.resources else {})
    )
    # A checkpoint has the state of its optimizer, which can then not be replaced to shard the model.
    fixed_fields = frozenset[str]() if checkpoint is None else frozenset({"optim"})
    plan = RunPlan.derived_from(
        parent,
        config=config,
        user_set_fields=user_set_fields,
        resources=requested.with_devices(1 if requested.devices == "all" else requested.devices),
        task=parent.task,
        # As long as the parent exists, which is checked again before the insertion, so do these.
        extra_eval_datasets=await service.extra_eval_datasets(session, parent),
        reward_run_ids=await service.reward_run_ids(session, parent),
    )
    errors = list[FieldError]()
    workers = await read_online_workers(session, settings, parent.backend)
    if requested.devices == "all":
        plan, errors = await use_all_devices(session, settings, workers, plan)
    if request.resources is not None and request.resources.labels:
        errors += await label_problems(session, rules, request.resources.labels)
    resources = plan.resources
    errors += backend_problems(settings, rules, resources)
    errors += placement_problems(workers, rules, resources)
    errors += await check_resources(session, settings, storage, plan, fixed_fields)
    is_whole = resources.devices % resources.sequence_parallel == 0
    if checkpoint is not None and is_whole and _row_shares(resources) != _row_shares(before):
        accumulation = _with_the_same_step(parent, config, before, resources)
        if isinstance(accumulation, FieldError):
            errors.append(accumulation)
        else:
            config = config.model_copy(update={"gradient_accumulation_steps": accumulation})
    if errors:
        raise validation_failed(errors)
    sharded = bool(parent.requirements.get("sharded"))
    if rules.loads_model and _device_division(resources) != _device_division(before):  # else it is decided
        data = await read_data(session, parent.dataset_id)
        subject = Subject(plan, data, sharded=sharded, fixed_fields=fixed_fields)
        sharded = (await with_sharding(session, settings, storage, subject)).sharded
    plan = replace(plan, config=config)
    if parent.task == RunTask.predict:
        return replace(plan, requirements=build_requirements(plan, least={}))
    return replace(plan, requirements=await estimate_requirements(session, settings, storage, plan, sharded))


def _with_the_same_optimizer(
    config: TrainingConfig, user_set_fields: frozenset[str]
) -> tuple[TrainingConfig, frozenset[str]]:
    """Return the configuration of a sharded run with the optimizer that it has used, also where that was a default."""
    used = config.optim if config.optim in SHARDED_OPTIMIZERS else SHARDED_OPTIMIZERS[0]
    return config.model_copy(update={"optim": used}), user_set_fields | {"optim"}


def _device_division(resources: Resources) -> tuple[int, str, int, int]:
    return resources.devices, resources.sharding, resources.sequence_parallel, resources.expert_parallel


def _row_shares(resources: Resources) -> int:
    """Return the number of devices, or groups of them, that the rows of a step are divided among."""
    return resources.devices // resources.sequence_parallel


def _with_the_same_step(parent: Run, config: TrainingConfig, was: Resources, resources: Resources) -> int | FieldError:
    """Return the gradient accumulation with which a step on these devices has as many rows as before the checkpoint.

    Without it rows would be skipped, or trained twice.
    """
    before: int = parent.config["batch_size"] * parent.config["gradient_accumulation_steps"] * _row_shares(was)
    shares = _row_shares(resources)
    # Each device generates whole groups of completions.
    group = 1 if config.generation is None else config.generation.num_generations
    at_once = math.lcm(config.batch_size, group)

    def is_same_step(shares: int) -> bool:
        return before % (at_once * shares) == 0 and before // (config.batch_size * shares) <= MOST_MICRO_BATCHES

    if is_same_step(shares):
        return before // (config.batch_size * shares)
    each = resources.sequence_parallel
    fitting = [number * each for number in range(1, MOST_DEVICES // each + 1) if is_same_step(number)]
    rows = "rows" if config.generation is None else f"completions in groups of {group}"
    message = (
        f"is {resources.devices}, but a step of the run has {before} {rows}, and `batch_size` is {config.batch_size}: "
        f"a checkpoint can be resumed on {', '.join(map(str, fitting))} devices"
    )
    return FieldError(field="resources.devices", code="does_not_divide", message=message)


async def _lock_ended_run(session: AsyncSession, run_id: str) -> Run:
    # Locked, so that this and the deletion of the run or its checkpoints wait for each other.
    run = await service.lock_run(session, run_id, for_child=True)
    if run.status not in TERMINAL:
        raise conflict(
            "run_is_live",
            f"Run {run_id} is {run.status}; only a run that has ended can be resumed: wait, or stop it first.",
        )
    if not RunTask(run.task).saves_checkpoints:
        message = f"Run {run_id} does not train (task `{run.task}`), so there is nothing to resume; create a new one."
        raise conflict("not_a_training", message)
    return run


def _merge_configuration(
    parent: Run, changed: dict[str, Any], request: RunResume, sent: list[FieldError]
) -> tuple[TrainingConfig, frozenset[str]]:
    """Return the parent's configuration with the overrides, and the names of all fields that a user set.

    `changed` are the fields that actions have changed while the parent trained, `sent` the errors of destinations.
    """
    refused = resume_problems(parent.config, request.config) + sent
    replaces_steps = "epochs" in request.config and "max_steps" not in request.config
    if replaces_steps and {**parent.config, **changed}.get("max_steps") is not None:
        changed = {**changed, "max_steps": None}  # `max_steps` would take precedence over `epochs`
    merged: dict[str, Any] = {**parent.config, **changed, **request.config}
    user_set_fields = set(parent.user_set_fields) | named_fields(changed) | given_fields(request.config)
    user_config = without_defaults(merged, user_set_fields)
    errors, _ = config_problems(BACKEND_RULES.get(parent.backend), user_config, parent.eval_dataset_id is not None)
    reported = {problem.field for problem in refused}
    problems = refused + [problem for problem in errors if problem.field.split(".")[0] not in reported]
    if problems:
        raise validation_failed([about_config(problem) for problem in problems])
    return TrainingConfig.model_validate(drop_unknown_fields(merged, user_set_fields)), frozenset(user_set_fields)


async def _checkpoint_at(session: AsyncSession, storage: Storage, path: str) -> str:
    """Return the id of the newest checkpoint in a folder of the storage, as runs show it.

    With an object store, the folder of its working copy names the checkpoint too.
    """
    *_, run_id, _, name = ["", "", *path.rstrip("/").split("/")]
    query = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.name == name)
    candidates = await session.scalars(query.order_by(Checkpoint.id.desc())) if is_id(run_id, "run") else ()
    for saved in candidates:
        local = storage.named_checkpoint(run_id, saved.attempt, name)
        if path.rstrip("/") in (storage.shown_path(run_id, saved.attempt, name), str(local)):
            return saved.id
    message = "is not the folder of a checkpoint; use `checkpoint_path` of a run, or an id of GET …/checkpoints"
    raise invalid(
        [FieldError(field="checkpoint_path", code="checkpoint_not_found", message=message)],
        code="checkpoint_not_found",
    )


async def _find_checkpoint(
    session: AsyncSession, parent: Run, checkpoint_id: str | None, field: str = "checkpoint_id"
) -> Checkpoint:
    """Return the checkpoint that `field` requests, or the newest good one of the run and of its ancestors."""
    run: Run | None = parent
    most_step: int | None = None
    while run is not None:
        if checkpoint_id is None:
            is_asked = run is parent
            checkpoint = await (
                preferred_checkpoint(session, run) if is_asked else furthest_good(session, run.id, most_step)
            )
            if checkpoint is not None:
                return checkpoint
        else:
            checkpoint = await session.get(Checkpoint, checkpoint_id, populate_existing=True)
            if checkpoint is not None and checkpoint.run_id == run.id:
                return _require_usable(checkpoint, field)
        # A run that has saved nothing yet can use the checkpoint that it started from, and those before it.
        source = await session.get(Checkpoint, run.resume_checkpoint_id) if run.resume_checkpoint_id else None
        most_step = source.step if source else None
        run = await find_locked_run(session, source.run_id) if source else None
        run = run if run is not None and run.task == parent.task else None  # a prediction uses the weights of others
    if checkpoint_id is not None:
        message = f"run {parent.id} and the runs it resumed have no such checkpoint; GET …/checkpoints lists them"
        raise invalid(
            [FieldError(field=field, code="checkpoint_not_found", message=message)],
            code="checkpoint_not_found",
        )
    raise conflict(
        "no_checkpoint",
        f"Run {parent.id} is {parent.status} and has no checkpoint that can be resumed; send "
        '{"from": "start"} to train it again from the first step.',
    )


def _require_usable(checkpoint: Checkpoint, field: str) -> Checkpoint:
    if checkpoint.deleted_at is None and checkpoint.bad_reason is None:
        return checkpoint
    why = "was deleted" if checkpoint.deleted_at else f"is corrupt ({checkpoint.bad_reason})"
    message = f"this checkpoint {why}; leave the field out to resume from the newest good one"
    raise invalid([FieldError(field=field, code="checkpoint_unusable", message=message)], code="checkpoint_unusable")


def _refuse_if_done(parent: Run, config: TrainingConfig, checkpoint: Checkpoint) -> None:
    unit, at, last = "step", float(checkpoint.step), _last_step(parent, config)
    if last is None and config.max_steps is None and config.min_steps is None:
        unit, at, last = "epoch", checkpoint.epoch, config.epochs
    # A run that was lost or stopped after its last step may still have to write its output.
    if last is None or at < last or (at == last and parent.status != "completed"):
        return
    raise ApiError(
        422,
        "nothing_left_to_train",
        f"The checkpoint of run {parent.id} at {unit} {at:.10g} is at or after the last {unit}, {last:.10g}; "
        "raise `max_steps`, `epochs` or `stop_at_step` in `config`, or use an earlier checkpoint.",
    )


def _last_step(parent: Run, config: TrainingConfig) -> float | None:
    """Return the step at which the new run would end; None if it is unknown."""
    if config.max_steps is not None:
        total: int | None = config.max_steps
    elif parent.config.get("max_steps") is None and parent.total_steps is not None:
        total = math.ceil(parent.total_steps * config.epochs / parent.config["epochs"])
    else:
        total = None
    if config.min_steps is not None and total is not None:
        total = max(total, config.min_steps)
    limits = [limit for limit in (total, config.stop_at_step) if limit is not None]
    return min(limits, default=None)
