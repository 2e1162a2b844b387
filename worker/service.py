"""A worker as a service: it registers, sends heartbeats, listens for control messages, and ends in order."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from app.infra.errors import TryLater
from app.workers import registry
from worker.context import WorkerContext
from worker.presence.control_listener import ControlListener
from worker.presence.heartbeat import Heartbeat
from worker.presence.registration import Registration

log = logging.getLogger(__name__)

_DATABASE_PAUSE = 2.0
_WARM_UP_LOOK = 1.0


class WorkerService:
    """Life of a worker process: started before it takes runs, closed at its end.

    Every method may be called from any thread.
    """

    def __init__(self, context: WorkerContext, take_parts: Callable[[Sequence[Row[Any]]], None] | None = None) -> None:
        """Create the service of a worker; `take_parts` gets the parts of runs that it is to train."""
        self.context = context
        self.registration = Registration(
            context.settings, context.id, context.name, context.machine, context.backends, context.launcher,
            context.group_address,
        )  # fmt: skip
        seconds = context.settings.renew_seconds
        self._heartbeat = Heartbeat(
            context.lease_engine, self.registration, context.leases, context.closing, seconds, take_parts
        )
        self._control_listener = ControlListener(context.redis, self._on_control)
        self._ended = threading.Event()

    def start(self, database_seconds: float = math.inf) -> bool:
        """Clean up after a dead predecessor, register once the database is available, start heartbeat and listeners.

        Returns:
            False if the worker was asked to end meanwhile.

        Raises:
            SetupError: The database schema is older than this code, or the object store is another one than the API's.
            TryLater: The database could not be reached for `database_seconds`.
        """
        context, began = self.context, time.monotonic()
        context.status_file.open()
        context.launcher.start()
        while trouble := self.registration.try_register(context.engine, context.working_copy, time.monotonic() - began):
            if time.monotonic() - began > database_seconds:
                raise TryLater(trouble)
            if context.closing.wait(_DATABASE_PAUSE):
                return False
        self._heartbeat.start()
        context.telemetry.start()
        if context.uploader:
            context.uploader.start()
        self._control_listener.start()
        context.publisher.start()
        threading.Thread(target=self._note_warm, name="warm-up", daemon=True).start()
        machine = context.machine
        log.info("worker %s on %s: %d slot(s) of %s", context.id, context.name, machine.slots, machine.devices[0].name)
        return True

    def stop_claiming(self) -> None:
        """Take no more runs; current runs finish."""
        self.context.closing.set()
        self.context.status_file.update(draining=True)
        self._heartbeat.beat_now()

    def drain(self) -> None:
        """Take no more runs; current runs save and are released."""
        self.context.drain()
        self._heartbeat.beat_now()

    def close(self) -> None:
        """Mark the worker as offline and stop everything that still runs."""
        context = self.context
        self._ended.set()
        self._heartbeat.close()  # first: it would bring parts to train
        context.publisher.close()
        self._control_listener.close()
        context.telemetry.close()
        context.launcher.stop()
        if context.uploader:
            context.uploader.close()
        # If the database has fallen silent, a new connection gives up after 5 s, an open one only after 15 s.
        context.engine.dispose()
        try:
            with context.engine.begin() as connection:
                connection.execute(registry.mark_offline([context.id]))
        except SQLAlchemyError as error:
            log.warning("this worker could not be marked as offline, the missing heartbeat will show it: %s", error)
        context.engine.dispose()
        context.lease_engine.dispose()
        context.status_file.close()
        context.tracing.close()

    def _on_control(self, name: str) -> None:
        """Renew the lease on a run, or look for parts to train, on a message that names the run or this worker."""
        if name == self.context.id:
            self._heartbeat.beat_now()
        else:
            self.context.leases.renew_now(name)

    def _note_warm(self) -> None:
        """Record once that a launch would not wait for the zygote to load."""
        while not self._ended.is_set():
            if self.context.launcher.wait_ready(_WARM_UP_LOOK):
                self.context.status_file.update(warm=True)
                return
