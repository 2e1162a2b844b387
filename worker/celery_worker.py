"""The Celery program of a worker: one thread per slot."""

import logging
import os
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import Any

from celery import Celery
from celery.apps.worker import Worker
from celery.concurrency.thread import TaskPool
from celery.worker import state
from celery.worker.consumer import Consumer
from redis.exceptions import DataError, RedisError

from app.infra.broker import TASK
from worker.attempts import supervisor
from worker.context import WorkerContext
from worker.signals import SignalHandler

_HINT_HOLD_SECONDS = 1.0
"""Seconds for which a worker that takes no runs keeps a hint, so that it does not receive it again at once."""


class CeleryProgram(Worker):  # type: ignore[misc]  # Celery has no types
    """Celery worker with this project's signal handling and logging."""

    def __init__(self, signals: SignalHandler, **options: Any) -> None:
        self._signals = signals
        super().__init__(**options)

    def setup_logging(self, colorize: bool | None = None) -> bool:
        """Skip Celery's logging setup, which would keep messages about claimed and released runs out of the log."""
        return True

    def install_platform_tweaks(self, _worker: Worker) -> None:
        """Skip Celery's signal handlers.

        Its second SIGINT would cancel tasks, and its SIGHUP replace the process without ending them.
        """

    def register_with_event_loop(self, hub: Any) -> None:
        """Wake the event loop for a request to end, which it would otherwise check only every few seconds."""
        super().register_with_event_loop(hub)
        hub.add_reader(self._signals.ending, lambda: None)
        hub.add_reader(self.pool.freed, self.pool.clear_wake_up)

    def _shutdown(self, warm: bool = True) -> None:
        """Wait for the threads without Celery's default timeout for new sockets, which is the whole process's.

        Draining lasts until the runs have ended: sockets that a supervisor opens meanwhile, to its trainer or to a
        store, would inherit a timeout of 5 s. Connections to the broker have timeouts of their own.
        """
        if self.blueprint is not None:
            self.blueprint.stop(self, terminate=not warm)
            self.blueprint.join()


class HintConsumer(Consumer):  # type: ignore[misc]  # Celery has no types
    """Celery's consumer, which drops a malformed message instead of ending the worker.

    Anything that can write to Redis may put something else into the queue.
    """

    def register_with_event_loop(self, hub: Any) -> None:
        """Drop what cannot be parsed as a message; called again after each reconnection."""
        super().register_with_event_loop(hub)
        handlers = self.task_consumer.channel.handlers
        handlers["BRPOP"] = partial(self._receive_valid, handlers["BRPOP"])

    def create_task_handler(self, *args: Any) -> Callable[[Any], None]:
        """Acknowledge and release what cannot be handled: it would occupy a slot for ever."""
        handle = super().create_task_handler(*args)

        def handle_hint(message: Any) -> None:
            before = set(state.reserved_requests)
            try:
                handle(message)
            except Exception as error:
                if _is_of_the_server(error):
                    raise
                log.warning("a message that is no hint is dropped: %r", error)
                message.ack_log_error(log, self.connection_errors)
                for request in set(state.reserved_requests) - before:
                    state.task_ready(request)

        return handle_hint

    def _receive_valid(self, receive: Callable[[], bool]) -> bool:
        try:
            return receive()
        except Exception as error:
            if isinstance(error, Empty) or _is_of_the_server(error):
                raise
            log.warning("a malformed message is dropped: %r", error)
            return True


def _is_of_the_server(error: Exception) -> bool:
    """Return True if Redis or the connection to it failed. Celery counts more as that, such as a missing field."""
    return isinstance(error, OSError | RedisError) and not isinstance(error, DataError)


class SlotPool(TaskPool):  # type: ignore[misc]  # Celery has no types
    """Celery's thread pool, which signals when one of its threads becomes free.

    A full worker takes no hints, and its event loop would ask for the next one only when it wakes up for another
    reason, up to a second later.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.freed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        super().__init__(*args, **options)

    def on_apply(self, *args: Any, **options: Any) -> Any:
        """Start a task; wake the event loop after the task has ended and no longer counts."""
        result = super().on_apply(*args, **options)
        result.f.add_done_callback(lambda _: os.eventfd_write(self.freed, 1))
        return result

    def clear_wake_up(self) -> None:
        """Clear the wake-up; the event loop itself asks for hints before each wait."""
        os.eventfd_read(self.freed)


log = logging.getLogger(__name__)


def register_task(app: Celery, context: WorkerContext) -> None:
    """Register `anneal.run_next`, which claims pending runs, the most urgent first, and trains them."""
    reported: str | None = None

    # Not shared: Celery would give the task of this worker to every other app in the process.
    @app.task(name=TASK, ignore_result=True, shared=False)  # type: ignore[untyped-decorator]
    def run_next() -> None:
        if not context.closing.is_set():
            if is_fit():
                supervisor.train_pending_runs(context)
                return
            context.closing.wait(_HINT_HOLD_SECONDS)
        # Another worker should get the hint now, not with the next round of hints.
        app.send_task(TASK, ignore_result=True, retry=False)

    def is_fit() -> bool:
        nonlocal reported
        trouble = context.health.unhealthy_reason()
        if trouble != reported:
            log.warning("no run is taken: %s", trouble) if trouble else log.info("runs are taken again")
            reported = trouble
        return trouble is None
