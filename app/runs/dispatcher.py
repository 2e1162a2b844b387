"""The API's one background loop: tell workers of waiting runs, take back lost ones."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from prometheus_client import Counter
from sqlalchemy import text, update
from sqlalchemy.exc import TimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app import background
from app.clock import utc_now
from app.config import Settings
from app.errors import is_database_away
from app.events.partitions import ensure_partitions
from app.queue import Queue
from app.runs import lifecycle
from app.workers.models import Worker

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOCK = 0x646973  # "dis": one replica at a time does a round; it does not matter which
_HINTS_A_ROUND = 100
_PARTITION_EVERY = 3600.0
_PARTITION_AGAIN = 60.0


class Dispatcher:
    """Runs in every API process; whichever gets the advisory lock does the round."""

    def __init__(self, engine: AsyncEngine, queue: Queue, settings: Settings) -> None:
        """`engine` is best its own: with that of the requests, many of those would look like an absent database."""
        self._engine = engine
        self._queue = queue
        self._lease = settings.lease_seconds
        self._interval = min(1.0, settings.lease_seconds / 6)
        self._task: asyncio.Task[None] | None = None
        self._no_reap_before = 0.0
        self._partitions_at = 0.0
        self.losses = Counter(
            "anneal_lease_losses",
            "Runs that this process took back from silent workers, by what became of them.",
            ["status"],
            registry=None,
        )

    async def start(self) -> None:
        """Begin the loop."""
        self._task = asyncio.create_task(self._loop(), name="dispatcher")

    async def stop(self) -> None:
        """End the loop."""
        if self._task:
            await background.end(self._task)

    async def _loop(self) -> None:
        owed = 0
        while True:
            try:
                hints, moved = await self.round()
                # Marked in the database as sent: those that the broker could not take are owed until it can.
                owed = min(owed + hints, _HINTS_A_ROUND)
                if owed and await self._queue.hint(owed):
                    owed = 0
                for run_id in moved:
                    await self._queue.wake(run_id)
            except Exception:  # without this loop no run would ever start again
                log.exception("dispatcher: a round failed")
            await asyncio.sleep(self._interval)

    async def round(self) -> tuple[int, list[str]]:
        """One look: how many hints to send (marked already, sent after the commit), and which runs moved.

        In a transaction for each job, so that one that fails takes no other with it.
        """
        now = time.monotonic()
        moved = await self._job("taking back lost runs", self._reap) if now >= self._no_reap_before else None
        hints = await self._job("telling workers of waiting runs", _hint)
        if now >= self._partitions_at:
            done = await self._job("making partitions", _partitions)
            self._partitions_at = now + (_PARTITION_AGAIN if done is None else _PARTITION_EVERY)
        return hints or 0, moved or []

    async def _job(self, what: str, job: Callable[[AsyncConnection], Awaitable[T]]) -> T | None:
        """What one job answers, in a transaction of its own; None when another replica is at it, or it failed."""
        asked = time.monotonic()
        try:
            async with self._engine.begin() as connection:
                mine = await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": _LOCK})
                if self._is_late(asked):
                    return None
                done = await job(connection) if mine else None
            self._is_late(asked)
            return done
        except Exception as error:
            if _is_absence(error):
                self._grant_grace(error)
            else:
                log.exception("dispatcher: %s failed, trying again", what)
            return None

    def _is_late(self, asked: float) -> bool:
        """Return whether the server has answered so late that renewals may have waited too, and grant grace then."""
        is_late = time.monotonic() - asked > self._lease / 2
        if is_late:
            self._grant_grace("it has only now answered")
        return is_late

    def _grant_grace(self, why: object) -> None:
        """While Postgres was away, or hung, nobody could renew: one lease of grace before anything is called lost."""
        self._no_reap_before = time.monotonic() + self._lease
        log.warning("dispatcher: the database was away, trying again: %s", why)

    async def _reap(self, connection: AsyncConnection) -> list[str]:
        rows = (await connection.execute(lifecycle.reap(self._lease))).mappings().all()
        await connection.execute(silent_workers(self._lease))
        return [self._told(row) for row in rows]

    def _told(self, row: Any) -> str:
        run_id, worker_id, status = row["id"], row["worker_id"], row["status"]
        log.warning("run %s: worker %s is lost, the run is %s now", run_id, worker_id, status, extra={"run_id": run_id})
        self.losses.labels(status).inc()
        return str(run_id)


def silent_workers(lease_seconds: float) -> Any:
    """Workers that have not been heard of for three leases count as gone until they speak again."""
    silence = text("clock_timestamp() - make_interval(secs => :silence)").bindparams(silence=3 * lease_seconds)
    return update(Worker).where(Worker.state != "offline", Worker.heartbeat_at < silence).values(state="offline")


async def _hint(connection: AsyncConnection) -> int:
    return len((await connection.execute(lifecycle.hint_due(_HINTS_A_ROUND))).all())


async def _partitions(connection: AsyncConnection) -> list[str]:
    # A new partition needs a lock that every append waits behind; better none today than no events meanwhile.
    await connection.execute(text("SET LOCAL lock_timeout = '2s'"))
    return await connection.run_sync(lambda sync: ensure_partitions(sync, utc_now()))


def _is_absence(error: Exception) -> bool:
    """Whether the database itself could not be reached, as against a busy pool, a lock or a mistake."""
    if isinstance(error, OSError):
        return True
    if isinstance(error, TimeoutError) or not is_database_away(error):
        return False
    state = getattr(getattr(error, "orig", None) or error, "sqlstate", None)
    # Connection failures, shutdowns, and a server that takes no writes, renewals neither.
    return state is None or state[:2] in ("08", "57") or state == "25006"
