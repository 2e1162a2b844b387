"""Event writer: stores events from its own thread, so that a slow or absent database never blocks the trainer."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from app.infra.db import is_away
from app.infra.logs.log_setup import with_current_context
from app.runs.events import log as event_log
from app.runs.events.log import LeaseFenced, NewEvent, Progress
from app.runs.reading.metrics.rollups import Rollups
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.spool import Limits, RunUpdate, Spool
from worker.lease import Lease, LeaseLost

log = logging.getLogger(__name__)


FLUSH_SECONDS = 0.1

_PAUSE_SECONDS = 0.5

_NO_ROOM_PAUSE_SECONDS = 2.0

_MAX_BATCH = 2000

_JOIN_SECONDS = 1.0


T = TypeVar("T")


class EventWriter:
    """Queue of events and changes of one attempt, stored in this order in transactions of up to 100 ms each."""

    def __init__(self, context: WorkerContext, run: ClaimedRun, lease: Lease) -> None:
        self.progress: Progress | None = None
        """Progress of the trainer; stored with the next events."""
        self._context = context
        self._run = run
        self._lease = lease
        limits = Limits(disk_reserve_bytes=context.settings.disk_reserve_bytes)
        self._waiting = Spool(run.id, context.settings.home / "spool", limits)
        self._stored = 0
        self._tried = 0
        """Number of events in the last transaction, if it failed."""
        self._rollups = Rollups(run.id, run.attempt)
        self._is_short = False
        """True while the embedded database has no room."""
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._over = False
        self._waits_past_lease = False
        self._thread = threading.Thread(
            target=with_current_context(self._run_writer), name=f"writer {run.id}", daemon=True
        )

    def __enter__(self) -> "EventWriter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._waiting.close()
            self._changed.notify_all()
        # A thread blocked in a statement of a frozen server must not keep the worker from ending.
        self._thread.join(_JOIN_SECONDS)

    @property
    def is_full(self) -> bool:
        """True if so much waits for Postgres that the trainer has to wait too."""
        return self._waiting.is_full

    def wait_past_lease(self) -> None:
        """Wait for the database without limit from now on: no trainer is left that the lease would bind.

        The lease epoch still decides: what is stored late is stored for the run's current owner, or not at all.
        """
        self._waits_past_lease = True

    def enqueue_item(self, item: NewEvent | RunUpdate) -> None:
        """Append an item, stored after everything that was put before it."""
        with self._changed:
            self._waiting.enqueue_item(item)
            self._changed.notify_all()

    def raise_if_failed(self) -> None:
        """Raise an error that the thread cannot recover from: `LeaseFenced`, or one that a retry does not fix."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait until everything is stored, for as long as the lease allows or, with no trainer left, beyond it.

        Raises:
            LeaseLost: It took too long, or the worker is to end and the database does not answer.
            LeaseFenced: Nothing more may be written.
        """
        with self._changed:
            while self._waiting:
                self.raise_if_failed()
                self._check_lease()
                self._changed.wait(FLUSH_SECONDS)
        self.raise_if_failed()

    def retry_during_outage(self, work: Callable[[], T]) -> T:
        """Run `work`, and retry while the database is unavailable, as long as `drain` would wait; raises the same."""
        while True:
            try:
                return work()
            except SQLAlchemyError as error:
                if not is_away(error):
                    raise
                self._check_lease()
                log.info("%s: the database is unavailable, trying again: %s", self._run.id, error)
                time.sleep(FLUSH_SECONDS * 2)

    def _check_lease(self) -> None:
        if self._lease.fenced:
            raise LeaseFenced(self._run.id)
        if self._lease.expired and (not self._waits_past_lease or self._context.draining.is_set()):
            raise LeaseLost(self._run.id)

    def _run_writer(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over)
                if self._over:
                    return
            pause = FLUSH_SECONDS
            try:
                self._store_waiting()
                if self._is_short:
                    pause = _NO_ROOM_PAUSE_SECONDS
            except SQLAlchemyError as error:
                if not is_away(error):
                    self._record_failure(error)
                    return
                log.info("%s: %d events wait for the database: %s", self._run.id, len(self._waiting), error)
                pause = _PAUSE_SECONDS
            except Exception as error:
                self._record_failure(error)
                return
            # A short pause makes one transaction of what a step reports in many pieces.
            with self._changed:
                self._changed.wait_for(lambda: self._over, pause)

    def _has_room(self) -> bool:
        """Return False while the embedded database has no room: it stops when its own writes find none.

        True in a worker that is to end: what waits would be lost with it, and the reserve has room for that.
        """
        reserve = self._context.database_reserve
        is_ending = self._context.draining.is_set()
        shortage = reserve.describe_shortage() if reserve is not None and not is_ending else None
        if shortage and not self._is_short:
            log.warning("%s: what the run reports waits, because %s", self._run.id, shortage)
        self._is_short = shortage is not None
        return not self._is_short

    def _record_failure(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _store_waiting(self) -> None:
        """Store what waits, while there is room: events in batches, each change of the run in its own transaction."""
        while self._has_room() and (batch := self._next_batch()):
            first = batch[0]
            if isinstance(first, RunUpdate):
                self._apply_update(first)
                self._drop_stored(1)
                first.stored()
            else:
                self._append_or_bisect([event for event in batch if isinstance(event, NewEvent)])

    def _drop_stored(self, count: int) -> None:
        """Remove the first items, which are stored, and notify readers."""
        with self._changed:
            if not self._over:
                self._waiting.drop_first(count)
            self._changed.notify_all()
        self._context.publisher.wake_streams(self._run.id)

    def _next_batch(self) -> list[NewEvent | RunUpdate]:
        """Return the first events that wait, up to the next change; or one change; or nothing."""
        with self._changed:
            # A failed batch is retried unchanged: if its commit only seemed to fail, its rollups are stored with it.
            head = self._waiting.first_items(self._tried or _MAX_BATCH)
        changes = [place for place, item in enumerate(head) if isinstance(item, RunUpdate)]
        return head[: max(changes[0], 1)] if changes else head

    def _append_or_bisect(self, batch: list[NewEvent]) -> None:
        """Store a batch; if Postgres refuses it, halve it down to the refused event, and log that in its place."""
        try:
            self._append_events(batch)
            return self._drop_stored(len(batch))
        except SQLAlchemyError as error:
            if not event_log.is_refused_data(error):
                raise
            refusal = error
        if len(batch) == 1:
            self._append_events([_refusal_event(batch[0], refusal)])
            return self._drop_stored(1)
        middle = len(batch) // 2
        self._append_or_bisect(batch[:middle])
        self._append_or_bisect(batch[middle:])

    def _apply_update(self, update: RunUpdate) -> None:
        if update.event is None:
            with self._context.engine.begin() as connection:
                update.apply(connection)
            return
        try:
            self._append_events([update.event, *update.more], update.apply)
        except SQLAlchemyError as error:
            if not (event_log.is_refused_data(error) or isinstance(error, IntegrityError)):
                raise
            self._append_events([_refusal_event(update.event, error)])

    def _append_events(self, batch: list[NewEvent], then: Callable[[Connection], None] | None = None) -> None:
        first = self._stored + 1
        self._tried = len(batch)
        with self._context.engine.begin() as connection:
            stored = event_log.append_events(
                connection, self._run.id, self._run.lease_epoch, first, batch, self.progress
            )
            self._rollups.store_changes(connection, first, batch, stored)
            if then:
                then(connection)
        self._rollups.note_commit()
        self._stored += len(batch)
        self._tried = 0


def _refusal_event(event: NewEvent, error: Exception) -> NewEvent:
    log.warning("an event of type %s is refused by the database: %s", event.type, error)
    line = f"an event of type {event.type} could not be stored; an operator finds the cause in the worker's log"
    return NewEvent.from_payload("log", event.ts.timestamp(), {"line": line, "stream": "anneal", "level": "error"})
