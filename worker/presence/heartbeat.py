"""Heartbeat of a worker, which keeps it online and brings the parts of runs that it is to train."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, Row, select
from sqlalchemy.exc import SQLAlchemyError

from app.runs.state import parts
from app.tables.runs import Run
from worker.presence.held_leases import HeldLeases
from worker.presence.registration import Registration

log = logging.getLogger(__name__)

_JOIN_SECONDS = 2.0


class Heartbeat:
    """Records from a thread of its own, every `seconds` and on request, that the worker is alive."""

    def __init__(
        self,
        engine: Engine,
        registration: Registration,
        leases: HeldLeases,
        closing: threading.Event,
        seconds: float,
        take_parts: Callable[[Sequence[Row[Any]]], None] | None = None,
    ) -> None:
        """Pass the parts that the worker is to train to `take_parts`; `closing` is set once it takes no more runs."""
        self._engine = engine
        self._registration = registration
        self._leases = leases
        self._closing = closing
        self._seconds = seconds
        self._take_parts = take_parts
        self._beat_now = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run_heartbeat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait a little for it: a heartbeat in flight would mark the worker as online."""
        self._ended.set()
        self._beat_now.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def beat_now(self) -> None:
        """Have the next heartbeat now, from its own thread; returns at once."""
        self._beat_now.set()

    def _run_heartbeat(self) -> None:
        while True:
            self._beat_now.wait(self._seconds)
            self._beat_now.clear()
            if self._ended.is_set():
                return
            try:
                self._beat()
            except SQLAlchemyError as error:
                log.info("heartbeat missed: %s", error)
            except Exception:  # without heartbeats the worker would count as lost
                log.exception("heartbeat failed")

    def _beat(self) -> None:
        registration = self._registration
        with self._engine.begin() as connection:
            registration.record_heartbeat(connection, is_draining=self._closing.is_set())
            if self._closing.is_set():
                self._note_progress(connection)
            is_asked = registration.group_address is not None
            part_rows = connection.execute(parts.of_worker(registration.worker_id)).all() if is_asked else ()
        if self._take_parts is not None and part_rows:
            self._take_parts(part_rows)

    def _note_progress(self, connection: Connection) -> None:
        """Record the progress of current runs for a caller that waits for them to finish."""
        steps = select(Run.id, Run.current_step, Run.total_steps).where(Run.id.in_(self._leases.run_ids))
        self._leases.note_progress({row.id: [row.current_step, row.total_steps] for row in connection.execute(steps)})
