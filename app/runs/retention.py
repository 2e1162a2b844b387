"""Retention: deletes events by month, checkpoints and whole runs after a configured time.

Never deletes what an unfinished run needs, what is pinned, or what a later run resumes, builds on or uses as a reward
model.
"""

import asyncio
import logging
import re
import time
from collections.abc import Collection, Coroutine, Iterator
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ARRAY, ColumnElement, Text, all_, and_, delete, func, literal, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import aliased

from anneal.contracts.run_status import TERMINAL
from app.api.errors import as_api_error
from app.audit.log import KEPT_DAYS
from app.config import Settings
from app.infra.async_tasks import skipping_errors
from app.infra.clock import ClockWatch
from app.infra.db import async_engine
from app.infra.files.object_store import StoreUnavailable
from app.infra.ids import id_at
from app.infra.storage import Storage
from app.runs.events import feed
from app.runs.state import deletion
from app.runs.state.checkpoints import retention
from app.tables.administration.audit import AuditEntry
from app.tables.checkpoints import Checkpoint
from app.tables.events import FeedEvent, QueuedFeedEvent, month_after
from app.tables.runs import Run, RunRewardModel

log = logging.getLogger(__name__)

_LOCK = 0x707275  # "pru": one pass at a time, across replicas and commands
_EVERY_SECONDS = 3600.0
_WATCH_SECONDS = 600.0
"""Seconds for which the clock is watched before a pass: a clock that is ahead makes everything look old."""
_CLOCK_TOLERANCE_SECONDS = 60.0
_RUNS_AT_ONCE = 500
_LOOK_BACK_DAYS = 7.0
_LOCK_TIMEOUT = "2s"
_MONTH = re.compile(r"run_events_(\d{4})_(\d\d)")


@dataclass(frozen=True)
class Policy:
    """Days to keep data after the end of a run; None: forever."""

    events_days: float | None = None
    checkpoints_days: float | None = None
    runs_days: float | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> "Policy":
        """Return the policy of the settings."""
        return cls(settings.keep_events_days, settings.keep_checkpoints_days, settings.keep_runs_days)

    def or_else(self, other: "Policy") -> "Policy":
        """Return this policy, with unset values taken from the other."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Policy(*(mine if mine is not None else theirs for mine, theirs in pairs))


@dataclass
class PruneResult:
    """Result of a pass: what was deleted, or would be."""

    runs: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    months: list[str] = field(default_factory=list)
    """Months whose events were deleted, such as `2026-01`."""
    is_busy: bool = False
    """Another process was pruning; nothing was done."""

    def as_sentence(self, dry_run: bool) -> str:
        """Return a summary sentence."""
        months = f"the events of {', '.join(self.months)}" if self.months else "no events"
        size = f"{self.checkpoint_bytes / 2**20:,.0f} MiB"
        verb = "Would delete" if dry_run else "Deleted"
        return f"{verb} {self.runs:,} runs, {self.checkpoints:,} checkpoints ({size}) and {months}."


class Pruning:
    """A retention pass in small transactions: if it is interrupted, the next one continues."""

    def __init__(
        self,
        engine: AsyncEngine,
        storage: Storage,
        policy: Policy,
        dry_run: bool = False,
        clock_watch: ClockWatch | None = None,
    ) -> None:
        self._engine = engine
        self._clock_watch = clock_watch
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)
        self._storage = storage
        self._policy = policy
        self._dry_run = dry_run
        self._result = PruneResult()
        self._now = datetime.max.replace(tzinfo=UTC)
        """Time of the database: if the clock of this machine is ahead, that must not make anything look old."""

    async def apply_policy(self) -> PruneResult:
        """Apply the policy; return what was deleted."""
        async with self._engine.connect() as turn:
            await turn.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            if not await turn.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": _LOCK}):
                return PruneResult(is_busy=True)
            sent = time.monotonic()
            self._now = (await turn.execute(select(func.clock_timestamp()))).scalar_one()
            if self._clock_watch is not None:
                change = self._clock_watch.observe(self._now, sent, time.monotonic())
                if change != 0.0:
                    log.warning("nothing is pruned now: the clock of the database's host was set by %+.0f s", change)
                    return PruneResult()
            for step in self._prune_steps():
                try:
                    with skipping_errors(log, "a part of the retention failed"):
                        await step
                except StoreUnavailable as error:  # what is in the database does not wait for it
                    log.warning("files of checkpoints cannot be deleted, trying again later: %s", error)
        return self._result

    def _prune_steps(self) -> Iterator[Coroutine[Any, Any, None]]:
        policy = self._policy
        if policy.runs_days is not None:
            yield self._prune_runs(self._days_ago(policy.runs_days))
        if policy.checkpoints_days is not None:
            yield self._prune_checkpoints(self._days_ago(policy.checkpoints_days))
        if policy.checkpoints_days is not None and not self._dry_run:
            yield self._left_over()
        if policy.events_days is not None:
            yield self._prune_events(self._days_ago(policy.events_days))
        if not self._dry_run:
            yield self._prune_audit(id_at("aud", self._days_ago(KEPT_DAYS)))

    async def _prune_audit(self, before: str) -> None:
        """Delete audit entries that are more than a year old."""
        old = select(AuditEntry.id).where(AuditEntry.id < before).order_by(AuditEntry.id).limit(10_000)
        rows = 1
        while rows:
            async with self._sessions() as session, session.begin():
                gone = delete(AuditEntry).where(AuditEntry.id.in_(old)).returning(AuditEntry.id)
                rows = len((await session.scalars(gone)).all())

    def _days_ago(self, days: float) -> datetime:
        return self._now - timedelta(days=days)

    async def _prune_runs(self, before: datetime) -> None:
        """Delete whole runs, first those that no other run needs; others become deletable by that."""
        gone: set[str] = set()
        while True:
            async with self._sessions() as session, session.begin():
                run_ids = await _lock_prunable(session, before, gone)
                if not run_ids:
                    break
                self._result.runs += len(run_ids)
                if self._dry_run:
                    gone.update(run_ids)
                else:
                    await deletion.delete_rows(session, select(Run.id).where(Run.id.in_(run_ids)))
        if not self._dry_run:
            await deletion.delete_remaining_data(self._sessions, self._storage)

    async def _prune_checkpoints(self, before: datetime) -> None:
        """Delete checkpoints of runs that have ended, except the furthest and the best of each."""
        last = ""
        several = (
            select(Checkpoint.run_id)
            .where(Checkpoint.deleted_at.is_(None))
            .group_by(Checkpoint.run_id)
            .having(func.count() > 1)
        )
        while True:
            query = select(Run.id).where(*_ended_before(before), ~Run.pinned, Run.id.in_(several), Run.id > last)
            async with self._sessions() as session:
                runs = (await session.scalars(query.order_by(Run.id).limit(_RUNS_AT_ONCE))).all()
            for run_id in runs:
                with skipping_errors(log, "cannot delete the checkpoints of %s", run_id):
                    await self._checkpoints_of(run_id, before)
            if not runs:
                break
            last = runs[-1]

    async def _checkpoints_of(self, run_id: str, before: datetime) -> None:
        async with self._sessions() as session, session.begin():
            # A concurrent resume has locked the run; and the run may have been pinned since it was found.
            still = select(Run.id).where(Run.id == run_id, *_ended_before(before), ~Run.pinned)
            if await session.scalar(still.with_for_update()) is None:
                return
            rows = (await session.execute(retention.retire_ended(run_id))).all()
            self._result.checkpoints += len(rows)
            self._result.checkpoint_bytes += sum(row.bytes for row in rows)
            if self._dry_run:
                await session.rollback()
                return
        for row in rows:
            await self._remove_checkpoint(run_id, row.attempt, row.name)

    async def _left_over(self) -> None:
        """Delete folders of checkpoints that were marked as deleted before an earlier pass was interrupted."""
        marked = (
            select(Checkpoint.run_id, Checkpoint.attempt, Checkpoint.name)
            .join(Run, Run.id == Checkpoint.run_id)
            .where(Checkpoint.deleted_at > self._days_ago(_LOOK_BACK_DAYS), Run.status.in_(TERMINAL))
        )
        async with self._sessions() as session:
            rows = (await session.execute(marked)).all()
        for row in rows:
            await self._remove_checkpoint(row.run_id, row.attempt, row.name)

    async def _remove_checkpoint(self, run_id: str, attempt: int, name: str) -> None:
        with skipping_errors(log, "cannot delete checkpoint %s of %s", name, run_id):
            await self._storage.in_transfer(self._storage.remove_checkpoint, run_id, attempt, name)

    async def _prune_events(self, before: datetime) -> None:
        async with self._sessions() as session:
            partitions = (
                await session.scalars(
                    text(
                        "SELECT child.relname FROM pg_inherits JOIN pg_class AS child ON child.oid = inhrelid "
                        "WHERE inhparent = 'run_events'::regclass ORDER BY child.relname"
                    )
                )
            ).all()
        for name in partitions:
            if (match := _MONTH.fullmatch(name)) is None:
                continue
            start = datetime(int(match[1]), int(match[2]), 1, tzinfo=UTC)
            if month_after(start) > before:
                continue
            try:
                if await self._prune_month(name, start, before):
                    self._result.months.append(f"{start:%Y-%m}")
            except OperationalError as error:
                # For example, its table is in use: the other months do not wait for that.
                log.warning("cannot delete the events of %s, trying again later: %s", f"{start:%Y-%m}", error.orig)
            except Exception:
                log.exception("cannot delete the events of %s, trying again later", f"{start:%Y-%m}")

    async def _prune_month(self, name: str, start: datetime, before: datetime) -> bool:
        """Drop a month's partition, or replace it by one with the events of pinned runs only; no row is deleted."""
        low, high = id_at("run", start), id_at("run", month_after(start))
        inside = (Run.id >= low, Run.id < high)
        async with self._sessions() as session, session.begin():
            # This lock blocks appends: rather try again later than block them for long.
            await session.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'"))
            await session.execute(text("SET LOCAL statement_timeout = 0"))
            young = select(Run.id).where(*inside, Run.status.not_in(TERMINAL) | (Run.finished_at > before))
            if await session.scalar(young.limit(1)):
                return False
            # Locked, so that none of them is pinned in between.
            held = select(Run.id, Run.pinned).where(*inside).order_by(Run.id.desc()).with_for_update(read=True)
            pinned_ids = [row.id for row in (await session.execute(held)).all() if row.pinned]
            has_others = text(f"SELECT 1 FROM {name} WHERE run_id <> ALL(:kept) LIMIT 1")
            if not await session.scalar(has_others, {"kept": pinned_ids}):
                return False
            if not self._dry_run:
                await _drop_from_feed(session, pinned_ids, low, high)
                truncated = update(Run).where(*inside, Run.id.not_in(pinned_ids), Run.first_seq <= Run.event_seq)
                await session.execute(truncated.values(first_seq=Run.event_seq + 1))
                # Last: from here to the commit, no event of any run can be stored.
                await _exchange_partition(session, name, pinned_ids, low, high)
        return True


async def _drop_from_feed(session: AsyncSession, pinned_ids: list[str], low: str, high: str) -> None:
    """Delete the events of a month's runs from the feed of all runs; `TRUNCATED` takes the place of the last one."""

    def dropped_rows(table: type[FeedEvent | QueuedFeedEvent]) -> tuple[ColumnElement[bool], ...]:
        return (table.run_id >= low, table.run_id < high, table.run_id.not_in(pinned_ids))

    last = select(func.max(FeedEvent.number)).where(*dropped_rows(FeedEvent)).scalar_subquery()
    marked = update(FeedEvent).where(FeedEvent.number == last).values(run_id=feed.TRUNCATED, seq=0)
    await session.execute(marked)
    for table in (QueuedFeedEvent, FeedEvent):
        await session.execute(delete(table).where(*dropped_rows(table)))


async def _exchange_partition(session: AsyncSession, name: str, pinned_ids: list[str], low: str, high: str) -> None:
    # No injection: names are those of this service's partitions; bounds contain only digits and base32.
    if pinned_ids:
        await session.execute(text(f"CREATE TABLE {name}_kept (LIKE {name} INCLUDING ALL)"))
        await session.execute(
            text(f"INSERT INTO {name}_kept SELECT * FROM {name} WHERE run_id = ANY(:kept)"), {"kept": pinned_ids}
        )
        # With a valid constraint, attaching does not scan the table while it holds the lock.
        within = f"run_id IS NOT NULL AND run_id >= '{low}' AND run_id < '{high}'"
        await session.execute(text(f"ALTER TABLE {name}_kept ADD CONSTRAINT within CHECK ({within})"))
    await session.execute(text(f"ALTER TABLE run_events DETACH PARTITION {name}"))
    await session.execute(text(f"DROP TABLE {name}"))
    if pinned_ids:
        await session.execute(text(f"ALTER TABLE {name}_kept RENAME TO {name}"))
        await session.execute(
            text(f"ALTER TABLE run_events ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')")
        )
        await session.execute(text(f"ALTER TABLE {name} DROP CONSTRAINT within"))


async def _lock_prunable(session: AsyncSession, before: datetime, gone: Collection[str]) -> list[str]:
    """Lock and return runs to delete; of a fine-tuning job all or none, because it has the state of its newest run.

    `gone` are those that a dry run would have deleted.
    """
    member = aliased(Run)
    is_of_job = (member.job_run_id == Run.id, member.job_run_id.is_not(None))  # the second for the partial index
    kept_of_job = select(member.id).where(*is_of_job, ~and_(*_prunable(member, before, gone)))
    first_runs = select(Run.id).where(Run.job_run_id.is_(None), *_prunable(Run, before, gone), ~kept_of_job.exists())
    # No run is waited for, so that the order of the locks does not matter.
    first_ids = (await session.scalars(first_runs.limit(_RUNS_AT_ONCE).with_for_update(skip_locked=True))).all()
    of_jobs = select(Run.id, Run.job_run_id).where(Run.job_run_id.in_(first_ids), *_prunable(Run, before, gone))
    resumed = (await session.execute(of_jobs.with_for_update(skip_locked=True))).all()
    not_locked = Run.id.not_in([run.id for run in resumed])
    changing = select(Run.job_run_id).where(Run.job_run_id.in_(first_ids), not_locked)
    changing_jobs = set((await session.scalars(changing)).all())
    run_ids = [run.id for run in resumed if run.job_run_id not in changing_jobs]
    return run_ids + [run_id for run_id in first_ids if run_id not in changing_jobs]


def _prunable(run: Any, before: datetime, gone: Collection[str]) -> list[ColumnElement[bool]]:
    """Return the conditions on a run that has ended long ago, is not pinned, and is not needed by another job."""
    other = aliased(Run)
    deleted = all_(literal(sorted(gone), ARRAY(Text)))
    needed = select(other.id).where((other.parent_run_id == run.id) | (other.base_run_id == run.id))
    is_of_job = func.coalesce(other.job_run_id, other.id) == func.coalesce(run.job_run_id, run.id)
    needed = needed.where(other.id != deleted, ~is_of_job)
    reward_users = select(RunRewardModel.run_id).where(RunRewardModel.reward_run_id == run.id)
    reward_users = reward_users.where(RunRewardModel.run_id != deleted)
    pinned = select(Checkpoint.id).where(
        Checkpoint.run_id == run.id, Checkpoint.pinned, Checkpoint.deleted_at.is_(None)
    )
    free = [~run.pinned, ~needed.exists(), ~reward_users.exists()]
    return [*_ended_before(before, run), *free, ~pinned.exists(), run.id != deleted]


def _ended_before(before: datetime, run: Any = Run) -> list[ColumnElement[bool]]:
    # Ids sort by creation time, which precedes the end, so this bounds the search by the primary key.
    started_before = run.id < id_at("run", before + timedelta(days=1))
    return [run.status.in_(TERMINAL), run.finished_at < before, started_before]


def run_prune(settings: Settings, policy: Policy, dry_run: bool) -> PruneResult:
    """Run one pass, for a command."""

    async def run_pass() -> PruneResult:
        engine = async_engine(settings.database_url or "", pool_size=2)
        try:
            return await Pruning(engine, Storage.shared(settings), policy, dry_run).apply_policy()
        finally:
            await engine.dispose()

    return asyncio.run(run_pass())


def in_background(engine: AsyncEngine, storage: Storage, settings: Settings) -> asyncio.Task[None]:
    """Prune by the settings every hour, until cancelled; also finish the deletion of runs."""

    async def prune_periodically() -> None:
        sessions = async_sessionmaker(engine, expire_on_commit=False)
        while True:
            clock_watch = ClockWatch(_CLOCK_TOLERANCE_SECONDS)
            try:
                await deletion.delete_remaining_data(sessions, storage)
                async with sessions() as session:
                    sent = time.monotonic()
                    now = (await session.execute(select(func.clock_timestamp()))).scalar_one()
                    clock_watch.observe(now, sent, time.monotonic())
                await asyncio.sleep(_WATCH_SECONDS)
                result = await Pruning(
                    engine, storage, Policy.from_settings(settings), clock_watch=clock_watch
                ).apply_policy()
                if result != PruneResult() and not result.is_busy:
                    log.info("pruned: %s", result)
            except Exception as error:
                if as_api_error(error) is None:
                    log.exception("pruning failed, trying again in an hour")
                else:
                    log.info("pruning is delayed: %s", error)
            await asyncio.sleep(_EVERY_SECONDS - _WATCH_SECONDS)

    return asyncio.create_task(prune_periodically(), name="pruning")
