"""The API's one background loop: tell workers of waiting runs, take back lost ones."""

import asyncio
import logging
import time
from typing import Any

from sqlalchemy import Connection, text, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from app import background
from app.clock import utc_now
from app.config import Settings
from app.events.partitions import ensure_partitions
from app.queue import Queue
from app.runs import lifecycle
from app.workers.models import Worker

log = logging.getLogger(__name__)

_LOCK = 0x646973  # "dis": one replica at a time does a round; it does not matter which
_HINTS_A_ROUND = 100
_PARTITION_EVERY = 3600.0


class Dispatcher:
    """Runs in every API process; whichever gets the advisory lock does the round."""

    def __init__(self, engine: AsyncEngine, queue: Queue, settings: Settings) -> None:
        self._engine = engine
        self._queue = queue
        self._lease = settings.lease_seconds
        self._interval = min(1.0, settings.lease_seconds / 6)
        self._task: asyncio.Task[None] | None = None
        self._no_reap_before = 0.0
        self._partitions_at = 0.0

    async def start(self) -> None:
        """Begin the loop."""
        self._task = asyncio.create_task(self._loop(), name="dispatcher")

    async def stop(self) -> None:
        """End the loop."""
        if self._task:
            await background.end(self._task)

    async def _loop(self) -> None:
        while True:
            try:
                hints, moved = await self.round()
            except (SQLAlchemyError, OSError) as error:
                # While Postgres was away nobody could renew: one lease of grace before anything is called lost.
                self._no_reap_before = time.monotonic() + self._lease
                log.warning("dispatcher: the database is away, trying again: %s", error)
            else:
                if hints:
                    await self._queue.hint(hints)
                for run_id in moved:
                    await self._queue.wake(run_id)
            await asyncio.sleep(self._interval)

    async def round(self) -> tuple[int, list[str]]:
        """One look: how many hints to send (marked already, sent after the commit), and which runs moved."""
        async with self._engine.begin() as connection:
            if not await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": _LOCK}):
                return 0, []
            moved: list[str] = []
            if time.monotonic() >= self._no_reap_before:
                rows = (await connection.execute(lifecycle.reap(self._lease))).mappings().all()
                moved = [_told(row) for row in rows]
            await connection.execute(silent_workers(self._lease))
            hints = (await connection.execute(lifecycle.hint_due(_HINTS_A_ROUND))).all()
            if time.monotonic() >= self._partitions_at:
                await connection.run_sync(_partitions)
                self._partitions_at = time.monotonic() + _PARTITION_EVERY
            return len(hints), moved


def _told(row: Any) -> str:
    log.warning("run %s: worker %s is lost, the run is %s now", row["id"], row["worker_id"], row["status"])
    run_id: str = row["id"]
    return run_id


def silent_workers(lease_seconds: float) -> Any:
    """Workers that have not been heard of for three leases count as gone until they speak again."""
    silence = text("clock_timestamp() - make_interval(secs => :silence)").bindparams(silence=3 * lease_seconds)
    return update(Worker).where(Worker.state != "offline", Worker.heartbeat_at < silence).values(state="offline")


def _partitions(connection: Connection) -> None:
    ensure_partitions(connection, utc_now())
