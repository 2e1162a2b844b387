"""What signals order a worker to do, heard from its first moment on and carried out in a thread of its own."""

import logging
import os
import select
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from celery.worker import state

from app.workers.local import END_SOON, TAKE_NO_MORE
from worker.host import Host

log = logging.getLogger(__name__)

_ENDINGS = (END_SOON, signal.SIGINT, signal.SIGHUP)
_MORE_SECONDS = 8.0
"""Than trainers have to save: by then their runs have been handed back, or the lease on them has run out."""


class Orders:
    """SIGTERM, SIGINT and SIGHUP: save, hand back, end. SIGUSR1: take no more, and end when there is nothing left.

    Handlers only write to a pipe: whatever lock the main thread holds at that moment, however many signals come.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writing, False)
        self.ending = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once the worker is to end: what Celery's event loop wakes up for."""
        for number in (*_ENDINGS, TAKE_NO_MORE):
            if signal.getsignal(number) != signal.SIG_IGN:  # `nohup anneal worker &` is meant to outlive its terminal
                signal.signal(number, self._hear)

    def obey(self, host: Host) -> None:
        """From now on (and what has been heard so far), on behalf of this worker."""
        threading.Thread(target=self._follow, args=[host], name="orders", daemon=True).start()

    def _hear(self, number: int, _frame: Any) -> None:
        with suppress(BlockingIOError):  # so many that this one says nothing new
            os.write(self._writing, bytes([number]))

    def _follow(self, host: Host) -> None:
        latest = None
        while True:
            patience = None if latest is None else max(0.0, latest - time.monotonic())
            if not select.select([self._reading], [], [], patience)[0]:
                # Whatever it hangs in: what is its own dies with it, and the runs go on from their checkpoints.
                log.error("the worker did not end in time; ending it at once")
                os._exit(1)
            for number in os.read(self._reading, 64):
                if number == TAKE_NO_MORE:
                    log.info("draining: no further run is taken, those at work finish")
                    host.take_no_more()
                elif latest is None:
                    log.info("shutting down: trainers save, runs are handed back")
                    host.drain()
                    latest = time.monotonic() + host.settings.save_grace_seconds + _MORE_SECONDS
            # Celery stops taking hints, waits for its threads, and returns.
            state.should_stop = 0
            os.eventfd_write(self.ending, 1)
