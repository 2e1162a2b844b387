"""Deletion of runs: the row at once, then large data (events, curves, files) step by step."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, delete, func, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import aliased

from anneal.contracts.run_status import TERMINAL
from app.api.errors import conflict, not_found
from app.infra.async_tasks import skipping_errors
from app.infra.files.object_store import StoreUnavailable
from app.infra.storage import Storage
from app.runs.state.checkpoints import uploads
from app.tables.checkpoints import Checkpoint
from app.tables.events import FeedEvent, QueuedFeedEvent, RunEvent
from app.tables.runs import Attempt, MetricRollup, Run, RunDeletion, RunRewardModel
from app.tables.usage import DeletedAttempt, select_attempts
from app.webhooks.outbox import ENQUEUE_DELETED

log = logging.getLogger(__name__)

_LOCK = 0x72656D  # "rem": one replica at a time, no matter which
_EVENTS_AT_ONCE = 20_000
_NAMED = 3


async def delete_runs(session: AsyncSession, run_ids: Sequence[str]) -> None:
    """Delete a run that has ended, or all runs of a fine-tuning job.

    Raises 409 if one is live, pinned, has a pinned checkpoint or is needed by another run, and for some runs of a job
    without the others: a job has the state of its newest run, so that without it an earlier state would return.
    """
    # A concurrent request that resumes a run or builds on it holds its lock: wait, and then see the new run.
    locked = select(Run.id, Run.status, Run.pinned, Run.job_run_id).where(Run.id.in_(run_ids)).order_by(Run.id.desc())
    runs = (await session.execute(locked.with_for_update())).all()
    if missing := sorted(set(run_ids) - {run.id for run in runs}):
        raise not_found("run", missing[0])
    for run in runs:
        await _refuse_kept(session, run)
    job_runs = await _runs_of_jobs(session, runs)
    if len(job_runs) > len(runs):
        raise conflict(
            "run_is_of_job",
            f"Run {runs[0].id} is {runs[0].status}, and one of {len(job_runs)} runs of a fine-tuning job, which are "
            "deleted together, because the job would return to an earlier state otherwise: "
            f"`anneal runs delete {' '.join(job_runs)}`, or POST /v1/runs/delete with these IDs.",
        )
    for run in runs:
        dependents = select_dependents(select(Run.id).where(Run.id == run.id)).subquery()
        others = select(dependents.c.id).where(dependents.c.id.not_in(run_ids))
        if needed_by := await first_few(session, others):
            raise conflict(
                "run_is_needed",
                f"Run {run.id} is {run.status}, and {needed_by} resumed it, or uses its output as base model or "
                "reward model: delete these first.",
            )
    await delete_rows(session, select(Run.id).where(Run.id.in_(run_ids)))


async def _refuse_kept(session: AsyncSession, run: Any) -> None:
    """Raise 409 for a run that is live or pinned, or has a pinned checkpoint."""
    if run.status not in TERMINAL:
        raise conflict("run_is_live", f"Run {run.id} is {run.status}; stop it first, and delete it when it has ended.")
    if run.pinned:
        raise conflict(
            "run_is_pinned", f'Run {run.id} is {run.status} and pinned; PATCH it with {{"pinned": false}} first.'
        )
    if pinned := await first_few(session, pinned_checkpoints(select(Run.id).where(Run.id == run.id))):
        raise conflict(
            "checkpoint_is_pinned",
            f"Run {run.id} is {run.status} and has pinned checkpoints: {pinned}. Unpin them first, or keep the run.",
        )


async def _runs_of_jobs(session: AsyncSession, runs: Sequence[Any]) -> Sequence[str]:
    """Return the ids of all runs of the jobs of these runs, newest first."""
    jobs = {run.job_run_id or run.id for run in runs}
    members = select(Run.id).where(or_(Run.id.in_(jobs), Run.job_run_id.in_(jobs)))
    return (await session.scalars(members.order_by(Run.id.desc()))).all()


async def lock_by_job(session: AsyncSession, run_ids: Sequence[str]) -> dict[str, list[str]]:
    """Lock runs until the commit, and return those of the same job by each run that exists."""
    job = func.coalesce(Run.job_run_id, Run.id)
    locked = select(Run.id, job).where(Run.id.in_(run_ids)).order_by(Run.id.desc()).with_for_update()
    runs_by_job = defaultdict[str, list[str]](list)
    for run_id, job_run_id in (await session.execute(locked)).tuples():
        runs_by_job[job_run_id].append(run_id)
    return {run_id: job_runs for job_runs in runs_by_job.values() for run_id in job_runs}


def select_dependents(runs: Select[str]) -> Select[str]:
    """Select ids of other runs that resumed one of `runs`, or use its output as base model or reward model."""
    other = aliased(Run)
    judged = select(RunRewardModel.run_id).where(RunRewardModel.reward_run_id.in_(runs))
    return select(other.id).where(
        other.parent_run_id.in_(runs) | other.base_run_id.in_(runs) | other.id.in_(judged),
        other.id.not_in(runs),
    )


def pinned_checkpoints(runs: Select[str]) -> Select[str]:
    """Select ids of pinned checkpoints of `runs` whose files exist."""
    return select(Checkpoint.id).where(Checkpoint.run_id.in_(runs), Checkpoint.pinned, Checkpoint.deleted_at.is_(None))


async def first_few(session: AsyncSession, ids: Select[str]) -> str:
    """Return the first few ids as text for a message; empty if there are none."""
    return ", ".join((await session.scalars(ids.limit(_NAMED))).all())


async def delete_rows(session: AsyncSession, runs: Select[str]) -> None:
    """Delete the rows of `runs`, but for what usage counts, and record that the rest must follow.

    The caller has checked and locked them.
    """
    noted = insert(RunDeletion).from_select(["run_id"], runs).on_conflict_do_nothing()
    await session.execute(noted)
    await session.execute(text(ENQUEUE_DELETED))
    # Usage counts them from now on by these rows. Locked, since those that are just being counted would count twice.
    used = select_attempts().where(Run.id.in_(runs)).with_for_update(of=Attempt)
    # A run that was deleted before, and imported again, has rows already.
    columns = [*DeletedAttempt.__table__.columns.keys()]
    await session.execute(insert(DeletedAttempt).from_select(columns, used).on_conflict_do_nothing())
    # Before the runs: of two that are deleted together, one may be the reward model of the other.
    await session.execute(delete(RunRewardModel).where(RunRewardModel.run_id.in_(runs)))
    await session.execute(delete(Run).where(Run.id.in_(runs)))


async def delete_remaining_data(sessions: async_sessionmaker[AsyncSession], storage: Storage) -> int:
    """Delete what deleted runs have left; return of how many. If it is interrupted, the next call continues."""
    done = 0
    async with sessions() as holding:
        # The lock is held until the end of this transaction, which may be idle while files are deleted.
        await holding.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        if not await holding.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": _LOCK}):
            return 0
        last = ""
        while run_id := await holding.scalar(select(func.min(RunDeletion.run_id)).where(RunDeletion.run_id > last)):
            last = run_id
            try:
                with skipping_errors(log, "cannot remove the data of deleted run %s", run_id):
                    await _delete_data_of(sessions, storage, run_id)
                    done += 1
            except StoreUnavailable as error:  # each further run would block a thread until the store's time limit
                log.warning("cannot remove the files of deleted runs, trying again later: %s", error)
                break
    return done


async def _delete_data_of(sessions: async_sessionmaker[AsyncSession], storage: Storage, run_id: str) -> None:
    await storage.in_transfer(storage.remove_run, run_id)
    while await _some_events(sessions, run_id):
        pass
    async with sessions() as session, session.begin():
        # In this order: what is being numbered meanwhile is then in the feed, and found there.
        for table in (QueuedFeedEvent, FeedEvent, MetricRollup):
            await session.execute(delete(table).where(table.run_id == run_id))
        await session.execute(delete(RunDeletion).where(RunDeletion.run_id == run_id))
        if storage.objects is not None:
            await session.execute(uploads.schedule_removal(run_id))
    log.info("removed the remaining data of deleted run %s", run_id)


async def _some_events(sessions: async_sessionmaker[AsyncSession], run_id: str) -> bool:
    first = select(RunEvent.seq).where(RunEvent.run_id == run_id).order_by(RunEvent.seq).limit(_EVENTS_AT_ONCE)
    last = select(func.max(first.subquery().c.seq))
    async with sessions() as session, session.begin():
        reached = await session.scalar(last)
        if reached is None:
            return False
        await session.execute(delete(RunEvent).where(RunEvent.run_id == run_id, RunEvent.seq <= reached))
    return True
