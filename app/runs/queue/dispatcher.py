"""Background loop of the API: notifies workers of pending runs, reaps lost ones, and numbers the feed of all runs."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from prometheus_client import Counter
from sqlalchemy import text, update
from sqlalchemy.exc import TimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from anneal.contracts.backends import WORKER_BACKENDS
from app.config import Settings
from app.infra import async_tasks
from app.infra.broker import ALL_RUNS, Broker
from app.infra.clock import ClockWatch, utc_now
from app.infra.db import is_away
from app.runs.events.feed import number_events
from app.runs.queue.order import HALF_LIFE_SECONDS, OWNER
from app.runs.queue.planning import PlannedQueue, changed_reasons, plan_queue
from app.runs.state import clock_changes, machine, parts
from app.tables.events import ensure_partitions
from app.tables.runs import Attempt
from app.tables.scheduling import HOLD_SECONDS
from app.tables.usage import DeletedAttempt, count_attempts, count_budgets
from app.tables.workers import Worker
from app.workers.queries import IS_FRESH, silence_seconds

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOCK = 0x646973  # "dis": one replica at a time does a round, no matter which
# The time is that of the transaction's start, with which leases are compared.
_TURN = text("SELECT pg_try_advisory_xact_lock(:key) AS is_mine, now() AS now")
# In most rounds of an idle service, one statement replaces the transactions of all jobs that need one of these rows.
_FIND_WORK = text("""
    SELECT
        EXISTS (SELECT FROM runs WHERE status = 'pending') AS pending_runs,
        EXISTS (SELECT FROM run_parts WHERE ended_at IS NULL) AS open_parts,
        EXISTS (SELECT FROM queue_plan) AS holds,
        EXISTS (SELECT FROM event_feed_queue) AS feed_events,
        EXISTS (SELECT FROM api_keys WHERE max_device_hours IS NOT NULL) AS budgets
""")
_HINTS_A_ROUND = 100
_REASONS_A_ROUND = 200
_ACCOUNT_EVERY = 10.0
# Time in which no API process ran is not accounted for: it is unknown who used the devices. Rows of the future, which
# the server has after its clock was set back, say nothing about the last round.
_ACCOUNT = text(f"""
    WITH round AS (
        SELECT least(coalesce(extract(epoch FROM clock_timestamp() - max(updated_at)), 0), {2 * _ACCOUNT_EVERY})
            AS seconds FROM device_usage WHERE updated_at <= clock_timestamp()
    )
    INSERT INTO device_usage (owner, device_seconds, updated_at)
    SELECT {OWNER} AS owner, count(*) * round.seconds, clock_timestamp()
    FROM devices JOIN runs ON runs.id = devices.run_id CROSS JOIN round GROUP BY 1, round.seconds
    ON CONFLICT (owner) DO UPDATE SET updated_at = excluded.updated_at,
        device_seconds = excluded.device_seconds + device_usage.device_seconds * power(0.5,
            greatest(cast(extract(epoch FROM excluded.updated_at - device_usage.updated_at) AS float), 0)
            / {HALF_LIFE_SECONDS})
""")
_PLAN_PAUSES = 5
"""Minimum time between two plans of the queue, as a multiple of the duration of the last one."""
_PLAN_PAUSE_SECONDS = HOLD_SECONDS / 3
"""Maximum time between two plans: holds that are not renewed in time no longer count."""
_COUNT_EVERY = 10.0
_ATTEMPTS_AT_ONCE = 2000
_PARTITION_EVERY = 3600.0
_PARTITION_AGAIN = 60.0


class RoundWork(NamedTuple):
    """Rows for the jobs of a round: False where there are none, which the defaults do not say."""

    pending_runs: bool = True
    open_parts: bool = True
    holds: bool = True
    feed_events: bool = True
    budgets: bool = True


class Dispatcher:
    """Dispatcher loop of an API process; of all replicas, the one that gets the advisory lock does the round."""

    def __init__(
        self, engine: AsyncEngine, queue: Broker, settings: Settings, backends: Sequence[str] = WORKER_BACKENDS
    ) -> None:
        """Create the dispatcher.

        `engine` should not be shared with requests: many of those would make the database look unavailable. `backends`
        are those whose runs workers claim.
        """
        self._engine = engine
        self._queue = queue
        self._settings = settings
        self._backends = list(backends)
        self._lease = settings.lease_seconds
        self._interval = min(1.0, settings.lease_seconds / 6)
        self._task: asyncio.Task[None] | None = None
        self._no_reap_before = 0.0
        self._clock_watch = ClockWatch(tolerance_seconds=self._lease / 6)
        self._clock_change: float | None = 0.0
        """Seconds by which the database's clock was set, until stored times are corrected; 0.0 at first: unknown."""
        self._account_at = 0.0
        self._count_at = 0.0
        self._plan_at = 0.0
        self._startable: list[str] = []
        """Runs that could start when the queue was planned."""
        self._partitions_at = 0.0
        self._numbers_feed = True
        self.losses = Counter(
            "anneal_lease_losses",
            "Runs that this process requeued or ended because their worker was lost, by their new status.",
            ["status"],
            registry=None,
        )

    async def start(self) -> None:
        """Start the loop."""
        self._task = asyncio.create_task(self._loop(), name="dispatcher")

    async def stop(self) -> None:
        """Stop the loop."""
        if self._task:
            await async_tasks.cancel_and_wait(self._task)

    async def _loop(self) -> None:
        owed = 0
        while True:
            try:
                hints, moved = await self.round()
                # Marked in the database as sent: hints that the broker did not accept are sent again until it does.
                owed = min(owed + hints, _HINTS_A_ROUND)
                if owed and await self._queue.wake_workers(owed):
                    owed = 0
                for run_id in moved:
                    await self._queue.wake_streams(run_id)
                numbered = 0
                if self._numbers_feed:
                    numbered = await self._job("numbering the feed of all runs", number_events) or 0
                if numbered:
                    await self._queue.wake_streams(ALL_RUNS)
            except Exception:  # without this loop no run would start again
                log.exception("dispatcher: a round failed")
            await asyncio.sleep(self._interval)

    async def round(self) -> tuple[int, list[str]]:
        """Do one round; return how many hints to send (marked already), and the runs with new events.

        Each job has its own transaction, so that a failure does not affect the others.
        """
        now = time.monotonic()
        moved = None
        if self._clock_change is not None and await self._job("following the clock", self._follow_clock):
            self._clock_change = None
        # In every round: that this fails, or takes long, shows that no worker could renew its lease.
        if self._may_reap():
            moved = await self._job("reaping lost runs", self._reap)
        work = await self._job("looking for work", _find_work) or RoundWork()
        if work.open_parts and self._may_reap():
            await self._job("reaping lost parts of runs", self._reap_parts)
        if now >= self._account_at:
            await self._job("accounting for devices", _account)
            self._account_at = now + _ACCOUNT_EVERY
        # A history that was not counted takes several rounds; budgets are counted thereafter.
        if now >= self._count_at and await self._job("counting attempts", _count_attempts) != _ATTEMPTS_AT_ONCE:
            if work.budgets:
                await self._job("counting what budgets leave", _count_budgets)
            self._count_at = now + _COUNT_EVERY
        explained = hints = None
        if (work.pending_runs or work.holds) and now >= self._plan_at:
            planned = await self._job("planning the queue", self._plan)
            took = time.monotonic() - now
            self._plan_at = now + took + min(took * (_PLAN_PAUSES - 1), _PLAN_PAUSE_SECONDS)
            if planned is not None:
                for run_id in planned.preempted:  # not only when they next renew their leases
                    await self._queue.call_worker(run_id)
                explained = await self._job("explaining why runs are pending", partial(_explain, planned))
        if work.pending_runs:
            hints = await self._job("notifying workers of pending runs", self._hint)
        if now >= self._partitions_at and self._may_reap():
            done = await self._job("creating partitions", _partitions)
            await self._job("forgetting parts of runs", _forget_parts)
            self._partitions_at = now + (_PARTITION_AGAIN if done is None else _PARTITION_EVERY)
        self._numbers_feed = work.feed_events or bool(explained)
        return hints or 0, [*(moved or []), *(explained or [])]

    async def _job(self, what: str, job: Callable[[AsyncConnection], Awaitable[T]]) -> T | None:
        """Run one job in its own transaction; return None if another replica has the lock, or it failed."""
        sent = time.monotonic()
        try:
            async with self._engine.begin() as connection:
                turn = (await connection.execute(_TURN, {"key": _LOCK})).one()
                if self._is_late(sent) or self._is_clock_set(turn.now, sent):
                    return None
                done = await job(connection) if turn.is_mine else None
            self._is_late(sent)
            return done
        except Exception as error:
            if _is_absence(error):
                self._grant_grace(error)
            else:
                log.exception("dispatcher: %s failed, trying again", what)
            return None

    def _is_late(self, sent: float) -> bool:
        """Return True if the server answered so late that renewals may have waited too; grant grace then."""
        is_late = time.monotonic() - sent > self._lease / 2
        if is_late:
            self._grant_grace("it took too long to answer")
        return is_late

    def _is_clock_set(self, now: datetime, sent: float) -> bool:
        """Return True if the clock of the database's host was set; leases, which it counts, then have one of grace."""
        change = self._clock_watch.observe(now, sent, time.monotonic())
        if change == 0.0:
            return False
        self._clock_change = (self._clock_change or 0.0) + change
        self._no_reap_before = time.monotonic() + self._lease
        self._plan_at = 0.0  # holds of the other time may no longer count
        log.warning("dispatcher: the clock of the database's host was set by %+.0f s; no run counts as lost", change)
        return True

    async def _follow_clock(self, connection: AsyncConnection) -> bool:
        for statement in clock_changes.follow_clock(self._lease, self._clock_change or 0.0):
            await connection.execute(statement)
        return True

    def _may_reap(self) -> bool:
        return self._clock_change is None and time.monotonic() >= self._no_reap_before

    def _grant_grace(self, why: object) -> None:
        """Reap nothing for one lease: while Postgres was unavailable or hung, no worker could renew its lease."""
        self._no_reap_before = time.monotonic() + self._lease
        log.warning("dispatcher: the database was unavailable, trying again: %s", why)

    async def _reap_parts(self, connection: AsyncConnection) -> None:
        for run_id, worker_id in (await connection.execute(parts.reap(self._lease))).all():
            log.warning("run %s: worker %s, which trains a part of it, is lost", run_id, worker_id)

    async def _reap(self, connection: AsyncConnection) -> list[str]:
        rows = (await connection.execute(machine.reap(self._lease))).mappings().all()
        await connection.execute(silent_workers(self._lease))
        return [self._report_loss(row) for row in rows]

    async def _plan(self, connection: AsyncConnection) -> PlannedQueue | None:
        planned = await plan_queue(connection, self._settings, self._backends, may_preempt=self._may_reap())
        self._startable = planned.startable_runs() if planned else []
        for run_id in planned.preempted if planned else ():
            log.info("run %s is preempted", run_id, extra={"run_id": run_id})
        return planned

    async def _hint(self, connection: AsyncConnection) -> int:
        return len((await connection.execute(machine.mark_notified(_HINTS_A_ROUND, self._startable))).all())

    def _report_loss(self, row: Any) -> str:
        run_id, worker_id, status = row["id"], row["worker_id"], row["status"]
        log.warning("run %s: worker %s is lost, the run is now %s", run_id, worker_id, status, extra={"run_id": run_id})
        self.losses.labels(status).inc()
        return str(run_id)


async def _explain(planned: PlannedQueue, connection: AsyncConnection) -> list[str]:
    """Write an event for each pending run whose reason to wait has changed; return these runs."""
    # In a thread: a thousand different runs and hundreds of workers take tenths of a second.
    changed = await asyncio.to_thread(changed_reasons, planned)
    for run_id, reason in changed[:_REASONS_A_ROUND]:
        await connection.execute(machine.report_pending_reason(run_id, reason))
    return [run_id for run_id, _ in changed[:_REASONS_A_ROUND]]


@cache
def silent_workers(lease_seconds: float) -> Any:
    """Mark workers without a heartbeat for three leases as offline; their next heartbeat brings them back."""
    is_silent = text(f"NOT {IS_FRESH}").bindparams(silence=silence_seconds(lease_seconds))
    return update(Worker).where(Worker.state != "offline", is_silent).values(state="offline")


async def _find_work(connection: AsyncConnection) -> RoundWork:
    return RoundWork(*(await connection.execute(_FIND_WORK)).one())


async def _account(connection: AsyncConnection) -> None:
    await connection.execute(_ACCOUNT)


async def _count_attempts(connection: AsyncConnection) -> int:
    counts = [
        (await connection.execute(count_attempts(table, _ATTEMPTS_AT_ONCE))).scalar_one()
        for table in (Attempt, DeletedAttempt)
    ]
    return max(counts)


async def _count_budgets(connection: AsyncConnection) -> None:
    await connection.execute(count_budgets())


async def _forget_parts(connection: AsyncConnection) -> None:
    await connection.execute(parts.forget())


async def _partitions(connection: AsyncConnection) -> list[str]:
    # A new partition needs a lock that blocks every append: rather fail and try again than block events.
    await connection.execute(text("SET LOCAL lock_timeout = '2s'"))
    return await connection.run_sync(lambda sync: ensure_partitions(sync, utc_now()))


def _is_absence(error: Exception) -> bool:
    """Return True if the database could not be reached, as opposed to a busy pool, a lock or a bug."""
    if isinstance(error, OSError):
        return True
    if isinstance(error, TimeoutError) or not is_away(error):
        return False
    state = getattr(getattr(error, "orig", None) or error, "sqlstate", None)
    # Connection failures, shutdowns, and a read-only server, which accepts no lease renewals either.
    return state is None or state.startswith(("08", "57P")) or state == "25006"
