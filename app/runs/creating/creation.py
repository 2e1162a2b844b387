"""Create runs: validation, idempotency, default experiment and insertion."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.background import BackgroundTasks

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.runs.requests import RunCheck, RunCreate
from app.api.idempotency import Idempotency, idempotency_key_reused
from app.config import Settings
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.runs.creating.estimates import service as estimates
from app.runs.creating.plan import NewRun, RunPlan
from app.runs.creating.validation.request import lock_references, validate_request
from app.runs.creating.validation.resources import build_requirements
from app.runs.creating.validation.result import ValidationResult
from app.runs.creating.validation.rewards import reward_problems
from app.runs.queue.fit import Needs, pending_reason, quota_reason
from app.runs.queue.fleet import read_fleet
from app.runs.state import machine
from app.runs.state.service import get_run
from app.tables.api_keys import ApiKey
from app.tables.experiments import Experiment
from app.tables.runs import Run, RunEvalDataset, RunRewardModel

DEFAULT_ID = "exp_" + "0" * 26
"""Experiment of runs that specify none; the id is fixed, so that two concurrent first runs create only one."""


async def default_experiment(session: AsyncSession, created_by: str | None) -> Experiment:
    """Return the default experiment for runs that specify none; the first such run creates it."""
    experiment = await session.get(Experiment, DEFAULT_ID)
    if experiment is not None:
        return experiment
    insertion = postgresql.insert(Experiment).values(id=DEFAULT_ID, name="default", created_by=created_by)
    await session.execute(insertion.on_conflict_do_nothing(index_elements=[Experiment.id]))
    return (await session.scalars(select(Experiment).where(Experiment.id == DEFAULT_ID))).one()


@dataclass(frozen=True)
class RunTransaction:
    """Transaction that creates or changes runs, with its caller and the tasks that follow its commit."""

    session: AsyncSession
    after_commit: BackgroundTasks
    caller_id: str | None = None
    """API key of the caller; None for the service itself."""
    idempotency: Idempotency | None = None


async def create_run(
    transaction: RunTransaction, settings: Settings, storage: Storage, request: RunCreate, run_id: str | None = None
) -> Run:
    """Create a run, or raise 422 with all errors; the same idempotency key or `run_id` returns the same run."""
    session, caller_id = transaction.session, transaction.caller_id
    wrong_rewards = await reward_problems(settings, request.config)
    if earlier := await find_by_idempotency_key(session, caller_id, transaction.idempotency):
        return earlier
    if run_id is not None and (known := await session.get(Run, run_id)) is not None:
        return known
    validation, needed = await _validate_and_warn(session, settings, storage, request, wrong_rewards, caller_id)
    plan = validation.build_plan(request)
    await lock_references(session, request, validation)
    new = NewRun(
        plan=plan,
        requirements=needed,
        experiment_id=request.experiment_id or (await default_experiment(session, caller_id)).id,
        name=request.name or f"{plan.config.method} of {plan.config.base_model}",
        id=run_id or new_id("run"),
        tags=request.tags,
        priority=request.priority,
        max_restarts=request.max_restarts,
        warnings=validation.warnings,
    )
    return await insert_run(transaction, new)


async def check_request(
    session: AsyncSession, settings: Settings, storage: Storage, request: RunCreate, caller_id: str
) -> RunCheck:
    """Validate a request as `create_run` does, without creating anything, and warn if the run could not start."""
    wrong_rewards = await reward_problems(settings, request.config)
    validation, _ = await _validate_and_warn(session, settings, storage, request, wrong_rewards, caller_id)
    return RunCheck(
        valid=not validation.errors,
        errors=validation.errors,
        warnings=validation.warnings,
        effective_config=validation.effective.model_dump(mode="json") if validation.effective else None,
    )


async def _validate_and_warn(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    request: RunCreate,
    wrong_rewards: Sequence[FieldError],
    caller_id: str | None,
) -> tuple[ValidationResult, dict[str, Any]]:
    """Validate a request, with a warning if its run could not start; return also what its device needs."""
    validation = await validate_request(session, settings, storage, request, wrong_rewards)
    if validation.errors or validation.config is None:
        return validation, {}
    needed = await device_requirements(session, settings, storage, validation.build_plan(request))
    needs = Needs.of(request.backend, validation.resources.devices, validation.resources.hosts, needed)
    waits = pending_reason(needs, await read_fleet(session, settings.lease_seconds))
    if waits is not None and waits.code != "no_worker":  # a warning of the validation says that
        validation.warnings.append(FieldError(field="resources", code=waits.code, message=waits.message))
    validation.warnings += await _quota_warnings(
        session, caller_id, request.experiment_id, validation.resources.devices
    )
    return validation, needed


async def _quota_warnings(
    session: AsyncSession, caller_id: str | None, experiment_id: str | None, devices: int
) -> list[FieldError]:
    """Return a warning for each quota that is smaller than a run on so many devices, which would wait for ever."""
    of_key = select(ApiKey.max_devices).where(ApiKey.id == caller_id)
    of_experiment = select(Experiment.name, Experiment.max_devices)
    of_experiment = of_experiment.where(Experiment.id == (experiment_id or DEFAULT_ID))
    quotas: list[tuple[str | None, int | None]] = [(None, await session.scalar(of_key))]
    quotas += [(row.name, row.max_devices) for row in await session.execute(of_experiment)]
    small = [(experiment, most) for experiment, most in quotas if most is not None and devices > most]
    reasons = [quota_reason(devices, experiment, most) for experiment, most in small]
    return [FieldError(field="resources.devices", code=one.code, message=one.message) for one in reasons]


async def device_requirements(
    session: AsyncSession, settings: Settings, storage: Storage, plan: RunPlan, sharded: bool | None = None
) -> dict[str, Any]:
    """Return what a device needs to train a run, from its plan and its estimate; ends the session's transaction.

    `sharded` is whether the model is divided among the devices; None: the estimate decides.
    """
    least: dict[str, int] = {}
    if plan.rules.loads_model and plan.dataset_id is not None:
        subject = estimates.Subject.from_plan(plan, await estimates.data_of(session, plan.dataset_id))
        if sharded is None:
            subject = await estimates.with_sharding(session, settings, storage, subject, plan.resources)
        else:
            subject = replace(subject, sharded=sharded)
        least, sharded = await estimates.least_memory_of(session, settings, storage, subject), subject.sharded
    return build_requirements(plan, least, sharded=bool(sharded))


async def find_by_idempotency_key(
    session: AsyncSession, created_by: str | None, idempotency: Idempotency | None
) -> Run | None:
    """Return the run that an earlier request with this key created; raise 422 if that request was different."""
    if idempotency is None:
        return None
    query = select(Run).where(Run.created_by == created_by, Run.idempotency_key == idempotency.key)
    run = await session.scalar(query)
    if run is not None and run.request_digest != idempotency.digest:
        raise idempotency_key_reused(run.id)
    return run


async def insert_run(transaction: RunTransaction, new: NewRun) -> Run:
    """Insert a run and its first event, or return the one that a duplicate of this request has just created."""
    session, idempotency = transaction.session, transaction.idempotency
    columns = {
        **new.column_values(),
        "created_by": transaction.caller_id,
        "idempotency_key": idempotency.key if idempotency else None,
        "request_digest": idempotency.digest if idempotency else None,
    }
    row = (await session.execute(machine.create(columns, new.reason))).mappings().one_or_none()
    if row is None:
        # A duplicate of this request came first and has committed: the insert waited for that.
        earlier = await find_by_idempotency_key(session, transaction.caller_id, idempotency)
        return earlier or await get_run(session, new.id)
    plan = new.plan
    if plan.reward_run_ids:
        uses = [{"run_id": new.id, "reward_run_id": reward_run_id} for reward_run_id in plan.reward_run_ids]
        await session.execute(postgresql.insert(RunRewardModel), uses)
    if plan.extra_eval_datasets:
        datasets = [
            {"run_id": new.id, "name": name, "dataset_id": dataset_id}
            for name, dataset_id in plan.extra_eval_datasets.items()
        ]
        await session.execute(postgresql.insert(RunEvalDataset), datasets)
    return Run(**row)
