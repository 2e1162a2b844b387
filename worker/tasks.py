"""The one task: a hint that work may wait."""

from celery import Celery

from app.queue import TASK
from worker import supervisor
from worker.host import Host


def register(app: Celery, host: Host) -> None:
    """Register `anneal.run_next`, which looks what is the most urgent and trains it."""

    # Not shared: Celery would give the task of this host to every other app in the process.
    @app.task(name=TASK, ignore_result=True, shared=False)  # type: ignore[untyped-decorator]
    def run_next() -> None:
        if host.closing.is_set():
            # Taken in the last moment: somebody else should hear of it now, not with the next round of hints.
            app.send_task(TASK, ignore_result=True, retry=False)
            return
        supervisor.work(host)
