"""Operations on runs that exist; `machine.py` writes their statuses."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Select, literal_column, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.attempt.run_facts import invalid_facts
from anneal.contracts.methods import models_of
from anneal.contracts.run_status import TERMINAL
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.requests import RunEdit
from anneal.contracts.stop import StopMode
from app.api.errors import conflict, not_found
from app.infra.ids import is_id
from app.runs.state import machine
from app.tables.events import RunEvent
from app.tables.runs import Run, RunEvalDataset, RunRewardModel


async def get_run(session: AsyncSession, run_id: str) -> Run:
    """Return the run; raise `run_not_found` if there is none."""
    run = await session.get(Run, run_id) if is_id(run_id, "run") else None
    if run is None:
        raise not_found("run", run_id)
    return run


async def reward_run_ids(session: AsyncSession, run: Run) -> Sequence[str]:
    """Return other runs whose outputs are reward models or the teacher of the run, oldest first."""
    if not any(models_of(run.config)):
        return []
    query = select(RunRewardModel.reward_run_id).where(RunRewardModel.run_id == run.id)
    return (await session.scalars(query.order_by(RunRewardModel.reward_run_id))).all()


async def extra_eval_datasets(session: AsyncSession, run: Run) -> dict[str, str]:
    """Return the ids of the run's extra evaluation datasets by name, in the order of the names."""
    if run.eval_dataset_id is None and not run.config.get("eval_split"):
        return {}
    query = select(RunEvalDataset.name, RunEvalDataset.dataset_id).where(RunEvalDataset.run_id == run.id)
    return dict((await session.execute(query.order_by(RunEvalDataset.name))).tuples().all())


async def run_facts(session: AsyncSession, run: Run) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the facts and the replaced defaults that the trainer reported last.

    None and no replaced defaults before it has reported them, and once retention has deleted the event.
    """
    if not run.attempt:
        return None, []
    # A literal, from which PostgreSQL concludes that the index of a run's history contains the event.
    is_config = RunEvent.type == literal_column("'config'")
    query = select(RunEvent.data["facts"], RunEvent.data["replaced"]).where(RunEvent.run_id == run.id, is_config)
    row = (await session.execute(query.order_by(RunEvent.seq.desc()).limit(1))).one_or_none()
    if row is None or not isinstance(row[0], dict):
        return None, []
    facts, replaced = row
    invalid = invalid_facts(facts)  # earlier versions stored them unchecked
    return {name: value for name, value in facts.items() if name not in invalid}, replaced or []


async def task_of(session: AsyncSession, run_id: str) -> RunTask:
    """Return the task of a run; `train` if there is none."""
    # Not the whole row, which the session would return again after the run has changed.
    return RunTask(await session.scalar(select(Run.task).where(Run.id == run_id)) or RunTask.train)


class RequestedStop(NamedTuple):
    """Backend of a run, and the stop that it was asked for."""

    backend: str
    stop_requested_at: datetime | None
    stop_mode: StopMode | None


async def requested_stop(session: AsyncSession, run_id: str) -> RequestedStop:
    """Return what stop a run was asked for, without its row; raise `run_not_found` if there is none."""
    query = select(Run.backend, Run.stop_requested_at, Run.stop_mode).where(Run.id == run_id)
    row = (await session.execute(query)).one_or_none()
    if row is None:
        raise not_found("run", run_id)
    return RequestedStop(*row)


async def edit_run(session: AsyncSession, run_id: str, body: RunEdit) -> Run:
    """Change the name, tags, pin or priority of a run; fields that were not given stay unchanged.

    A new priority is refused with 409 if the run has ended, or answers questions.
    """
    run = await lock_run(session, run_id)
    if body.priority is not None and run.task == RunTask.serve:
        raise conflict(
            "priority_is_fixed",
            f"Run {run_id} answers questions, and makes room for every other run: leave `priority` out.",
        )
    if body.priority is not None and run.status in TERMINAL:
        raise conflict("run_has_ended", f"Run {run_id} is {run.status}: `priority` applies to runs that wait.")
    for name, value in body.model_dump(exclude_none=True).items():
        setattr(run, name, value)
    await session.flush()
    return run


async def lock_run(session: AsyncSession, run_id: str, *, for_child: bool = False) -> Run:
    """Return the run, locked until the commit; `for_child`: it may change, but not be deleted."""
    query = select(Run).where(Run.id == run_id).execution_options(populate_existing=True)
    run = await session.scalar(query.with_for_update(read=for_child, key_share=for_child))
    if run is None:
        raise not_found("run", run_id)
    return run


async def lock_runs(
    session: AsyncSession, run_ids: Collection[str | None] | Select[str], *, for_child: bool = False
) -> None:
    """Lock those of the runs that exist until the commit; `for_child`: they may change, but not be deleted.

    Every transaction that waits for the locks of several runs takes them in this order: newest first, and so a run
    before those that it continues or whose output it uses. Otherwise two transactions could wait for each other.
    """
    query = select(Run.id).where(Run.id.in_(run_ids)).order_by(Run.id.desc())
    await session.execute(query.with_for_update(read=for_child, key_share=for_child))


async def stop_run(
    session: AsyncSession, run_id: str, mode: StopMode = "checkpoint", grace_seconds: float | None = None
) -> Run:
    """Request a stop; no error if a stop has ended the run, 409 if it ended by itself.

    Mode `best` requires that a best checkpoint exists. `grace_seconds` applies to immediate stops.
    """
    if mode == "epoch_end":
        statement = machine.request_stop_at_epoch_end(run_id)
    else:
        statement = machine.request_stop(run_id, mode, grace_seconds)
    moved = (await session.execute(statement)).mappings().one_or_none()
    run = await get_run(session, run_id)
    if moved is None and run.status != "cancelled":
        raise conflict(
            "run_has_ended", f"Run {run_id} is {run.status}: it has ended by itself and can no longer be stopped."
        )
    return run
