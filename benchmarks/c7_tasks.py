"""Tasks of C7's peers. Each only reports its start time; `C7_REDIS_URL` is the broker of all."""

import os
import time

import dramatiq
import redis
from celery import Celery
from dramatiq.brokers.redis import RedisBroker

from app.infra.broker import broker_url

STARTED = "c7:started"
URL = os.environ.get("C7_REDIS_URL", "redis://127.0.0.1")
CELERY_SETTINGS = {
    "task_default_queue": "c7-celery", "task_ignore_result": True, "worker_prefetch_multiplier": 1,
    "worker_send_task_events": False, "worker_enable_remote_control": False, "task_serializer": "json",
    "accept_content": ["json"], "broker_connection_retry_on_startup": True,
}  # fmt: skip

client = redis.Redis.from_url(URL)
celery = Celery("c7", broker=broker_url(URL))
celery.conf.update(CELERY_SETTINGS)
# Keep the default middleware (time limits, retries, …), as its guide recommends.
dramatiq.set_broker(RedisBroker(url=URL))


def body(name: str) -> None:
    """Report the start time, which is read first."""
    now = time.monotonic()
    client.lpush(STARTED, f"{name} {now}")


@celery.task(name="c7.body")
def celery_body(name: str) -> None:
    body(name)


@dramatiq.actor(queue_name="c7-dramatiq")
def dramatiq_body(name: str) -> None:
    body(name)
