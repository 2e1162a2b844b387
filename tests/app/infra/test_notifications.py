"""Hints over the broker: taken once and gone, whatever becomes of who took them."""

import logging
import threading
from collections.abc import Iterator

import pytest
from celery.contrib.testing.worker import start_worker
from redis import Redis

from app.config import Settings
from app.infra.broker import QUEUE, TASK, celery_app
from tests.waiting import eventually


@pytest.fixture
def broker(settings: Settings) -> Iterator[Redis]:
    with Redis.from_url(settings.redis_url or "") as client:
        yield client


@pytest.fixture
def log_level() -> Iterator[None]:
    """Restore the level of the root logger, which Celery's worker for tests raises for the rest of the process."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


@pytest.mark.usefixtures("log_level")
def test_a_hint_is_acknowledged_before_its_run_trains_so_it_never_comes_again(
    settings: Settings, broker: Redis
) -> None:
    """A hint that waited for the end of a run would be delivered a second time in the middle of a long one."""
    app = celery_app(settings.redis_url or "")
    training, over = threading.Event(), threading.Event()

    @app.task(name=TASK, ignore_result=True, shared=False)
    def train() -> None:
        training.set()
        over.wait(30)

    with start_worker(app, pool="threads", concurrency=1, perform_ping_check=False, queues=[QUEUE]):
        try:
            app.send_task(TASK)
            assert training.wait(30)
            eventually(lambda: broker.hlen("unacked") == 0, timeout=5, what="the hint is gone while its run trains")
            assert broker.llen(QUEUE) == 0
        finally:
            over.set()
