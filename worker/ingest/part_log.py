"""Log lines of a part of a run on another worker than its lead's."""

import logging
import threading
from collections import deque
from collections.abc import Sequence

from sqlalchemy.exc import SQLAlchemyError

from app.infra.db import is_away
from app.infra.logs.log_setup import with_current_context
from app.runs.events import log as event_log
from app.runs.events.log import LeaseFenced, NewEvent, Progress
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.spool import RunUpdate

log = logging.getLogger(__name__)

_LOG_SECONDS = 0.2
_MOST_LINES = 2000
"""Log lines that may wait for the database; older ones are dropped."""


class PartLog:
    """Sink of the log lines of a part, stored from a thread of its own.

    A line may get lost with the database, since only the lead can check which of its events are stored.
    """

    def __init__(self, context: WorkerContext, run: ClaimedRun) -> None:
        self.progress: Progress | None = None
        self._context = context
        self._run = run
        self._waiting: deque[NewEvent] = deque(maxlen=_MOST_LINES)
        self._dropped = 0
        """Lines that are lost: too many waited for the database, or it did not take them."""
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=with_current_context(self._write_batches), name=f"log {run.id}", daemon=True
        )

    def __enter__(self) -> "PartLog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def enqueue_item(self, item: NewEvent | RunUpdate) -> None:
        """Append a log line."""
        if isinstance(item, NewEvent):
            self._dropped += len(self._waiting) == _MOST_LINES
            self._waiting.append(item)

    def _write_batches(self) -> None:
        while True:
            is_last = self._over.wait(_LOG_SECONDS)
            if batch := [self._waiting.popleft() for _ in range(len(self._waiting))]:
                self._store_lines(batch)
            if is_last:
                return

    def _store_lines(self, batch: Sequence[NewEvent]) -> None:
        try:
            with self._context.engine.begin() as connection:
                event_log.append_lines(connection, self._run.id, self._run.lease_epoch, batch)
        except LeaseFenced:
            return  # the attempt has ended
        except SQLAlchemyError as error:
            if len(batch) > 1 and not is_away(error):  # one line must not cost the others
                half = len(batch) // 2
                self._store_lines(batch[:half])
                self._store_lines(batch[half:])
                return
            self._dropped += len(batch)
            log.warning("%s: %d log lines of its part are not stored: %s", self._run.id, self._dropped, error)
            return
        self._context.publisher.wake_streams(self._run.id)
