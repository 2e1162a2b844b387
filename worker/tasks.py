"""The one task: a hint that work may wait."""

from celery import Celery

from app.queue import TASK
from worker import supervisor
from worker.host import Host


def register(app: Celery, host: Host) -> None:
    """Register `anneal.run_next`, which looks what is the most urgent and trains it."""

    @app.task(name=TASK, ignore_result=True)  # type: ignore[untyped-decorator]
    def run_next() -> None:
        supervisor.work(host)
