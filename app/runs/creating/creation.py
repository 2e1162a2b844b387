"""Create runs: validation, idempotency, default experiment and insertion."""

from dataclasses import dataclass, replace

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
from app.runs.creating.plan import NewRun
from app.runs.creating.requirements import estimate_requirements
from app.runs.creating.validation.request import lock_references, validate_request
from app.runs.creating.validation.result import ValidationResult
from app.runs.queue.fit import Needs, pending_reason, quota_reason
from app.runs.queue.fleet import read_fleet
from app.runs.state import machine
from app.runs.state.service import get_run
from app.tables.administration.api_keys import ApiKey
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
    earlier = await find_by_idempotency_key(session, caller_id, transaction.idempotency)
    if earlier is None and run_id is not None:
        earlier = await session.get(Run, run_id)
    if earlier is not None:
        return earlier
    validation = await _validate_and_warn(session, settings, storage, request, caller_id)
    plan = validation.require_plan()
    await lock_references(session, request, plan)
    new = NewRun(
        plan=plan,
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
    validation = await _validate_and_warn(session, settings, storage, request, caller_id)
    return RunCheck(
        valid=not validation.errors,
        errors=validation.errors,
        warnings=validation.warnings,
        effective_config=validation.effective.model_dump(mode="json") if validation.effective else None,
    )


async def _validate_and_warn(
    session: AsyncSession, settings: Settings, storage: Storage, request: RunCreate, caller_id: str | None
) -> ValidationResult:
    """Validate a request; complete a plan by what its device needs, with a warning if the run could not start."""
    validation = await validate_request(session, settings, storage, request)
    if (plan := validation.plan) is not None:
        requirements = await estimate_requirements(session, settings, storage, plan)
        validation.plan = replace(plan, requirements=requirements)
        needs = Needs.of(plan.backend, plan.resources.devices, plan.resources.hosts, requirements)
        reason = pending_reason(needs, await read_fleet(session, settings.lease_seconds))
        if reason is not None and reason.code != "no_worker":  # a warning of the validation says that
            validation.warnings.append(FieldError(field="resources", code=reason.code, message=reason.message))
        devices = plan.resources.devices
        validation.warnings += await _quota_warnings(session, caller_id, request.experiment_id, devices)
    return validation


async def _quota_warnings(
    session: AsyncSession, caller_id: str | None, experiment_id: str | None, devices: int
) -> list[FieldError]:
    """Return a warning for each quota that is smaller than a run on so many devices, which would wait for ever."""
    of_key = select(ApiKey.max_devices).where(ApiKey.id == caller_id)
    of_experiment = select(Experiment.name, Experiment.max_devices)
    of_experiment = of_experiment.where(Experiment.id == (experiment_id or DEFAULT_ID))
    quotas: list[tuple[str | None, int | None]] = [(None, await session.scalar(of_key))]
    quotas += [(row.name, row.max_devices) for row in await session.execute(of_experiment)]
    reasons = [quota_reason(devices, name, most) for name, most in quotas if most is not None and devices > most]
    return [FieldError(field="resources.devices", code=reason.code, message=reason.message) for reason in reasons]


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


async def find_locked_run(session: AsyncSession, run_id: str) -> Run | None:
    """Return a run, which with its checkpoints is locked against deletion until the commit; None: there is none."""
    return await session.scalar(select(Run).where(Run.id == run_id).with_for_update(read=True, key_share=True))


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
