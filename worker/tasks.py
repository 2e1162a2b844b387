"""The only Celery task: a hint that runs may be pending."""

import logging

from celery import Celery

from app.queue import TASK
from worker import supervisor
from worker.host import Host

log = logging.getLogger(__name__)

_HINT_HOLD_SECONDS = 1.0
"""Seconds for which a worker that takes no runs keeps a hint, so that it does not receive it again at once."""


def register(app: Celery, host: Host) -> None:
    """Register `anneal.run_next`, which claims pending runs, the most urgent first, and trains them."""
    reported: str | None = None

    # Not shared: Celery would give the task of this host to every other app in the process.
    @app.task(name=TASK, ignore_result=True, shared=False)  # type: ignore[untyped-decorator]
    def run_next() -> None:
        if not host.closing.is_set():
            if is_fit():
                supervisor.work(host)
                return
            host.closing.wait(_HINT_HOLD_SECONDS)
        # Another worker should get the hint now, not with the next round of hints.
        app.send_task(TASK, ignore_result=True, retry=False)

    def is_fit() -> bool:
        nonlocal reported
        trouble = host.fitness.trouble()
        if trouble != reported:
            log.warning("no run is taken: %s", trouble) if trouble else log.info("runs are taken again")
            reported = trouble
        return trouble is None
