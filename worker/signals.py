"""Signals of a worker, received from its first moment on and handled in a separate thread."""

import logging
import os
import select
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from celery.worker import state

from app.workers.status_files import DRAIN_SIGNAL, SHUTDOWN_SIGNAL
from worker.service import WorkerService

log = logging.getLogger(__name__)

_TERMINATION_SIGNALS = (SHUTDOWN_SIGNAL, signal.SIGINT, signal.SIGHUP)
_EXTRA_SECONDS = 8.0
"""Added to the save grace of trainers: by then their runs are released, or the leases on them have expired."""


class SignalHandler:
    """Signal handler: SIGTERM, SIGINT and SIGHUP save, release and end; SIGUSR1 ends when current runs have finished.

    The handlers only write to a pipe, which is safe with any lock held by the main thread and any number of signals.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writing, False)
        self.ending = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once the worker is to end; Celery's event loop wakes up for it."""
        for number in (*_TERMINATION_SIGNALS, DRAIN_SIGNAL):
            if signal.getsignal(number) != signal.SIG_IGN:  # `nohup anneal worker &` is meant to outlive its terminal
                signal.signal(number, self._on_signal)

    def start(self, service: WorkerService) -> None:
        """Apply signals to this worker from now on, including those already received."""
        threading.Thread(target=self._handle_signals, args=[service], name="signals", daemon=True).start()

    def ignore_signals(self) -> None:
        """Ignore further signals: at its end, Python restores default handlers, and a second signal would kill."""
        for number in (*_TERMINATION_SIGNALS, DRAIN_SIGNAL):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _frame: Any) -> None:
        with suppress(BlockingIOError):  # so many are queued that this one adds nothing
            os.write(self._writing, bytes([number]))

    def _handle_signals(self, service: WorkerService) -> None:
        deadline = None
        while True:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._reading], [], [], timeout)[0]:
                # Something blocks it: its child processes die with it, and the runs continue from their
                # checkpoints.
                log.error("the worker did not end in time; exiting now")
                os._exit(1)
            for number in os.read(self._reading, 64):
                if number == DRAIN_SIGNAL:
                    log.info("draining: no further run is taken, current runs finish")
                    service.stop_claiming()
                elif deadline is None:
                    log.info("shutting down: trainers save, runs are released")
                    service.drain()
                    deadline = time.monotonic() + service.context.settings.save_grace_seconds + _EXTRA_SECONDS
            # Celery stops taking hints, waits for its threads and returns.
            state.should_stop = 0
            os.eventfd_write(self.ending, 1)
