"""Messages over Redis: hints that runs are pending, and wake-ups; all may be lost, PostgreSQL is authoritative."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from celery import Celery
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError, ResponseError

from app.config import Settings
from app.infra import async_tasks

log = logging.getLogger(__name__)

QUEUE = "anneal"
TASK = "anneal.run_next"
MAX_NOTIFICATIONS = 1000
_COUNT_SECONDS = 1.0
_SEND_SECONDS = 5.0
_PROBE_KEY = "anneal:probe"
CONTROL_CHANNEL = "anneal:control"
ALL_RUNS = "all"
"""Name of the feed of all runs, in place of a run's id."""


def events_channel(run_id: str) -> str:
    """Return the channel that announces new events of a run, or of all runs."""
    return f"anneal:run:{run_id}"


def celery_app(redis_url: str) -> Celery:
    """Create the Celery application, which senders and receivers of hints share.

    A hint may be lost, duplicated or late without harm, because the pending row in PostgreSQL is authoritative. So
    hints are acknowledged early, never redelivered (redelivery would start long tasks twice), and have no result.
    """
    app = Celery("anneal", broker=broker_url(redis_url), set_as_current=False)
    app.conf.update(
        task_default_queue=QUEUE,
        task_acks_late=False,
        task_reject_on_worker_lost=False,
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        result_backend=None,
        task_serializer="json",
        accept_content=["json"],
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_send_task_events=False,
        worker_enable_remote_control=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # An error response, as of a server that is read-only for a moment, must not end a worker.
        broker_channel_error_retry=True,
        broker_connection_timeout=2,
        broker_heartbeat=0,
        broker_transport_options={
            "socket_timeout": 20,
            "socket_connect_timeout": 2,
            "socket_keepalive": True,
            "health_check_interval": 15,
            "retry_on_timeout": False,
        },
        task_publish_retry=False,
    )
    return app


def broker_url(redis_url: str) -> str:
    """Return the URL of Redis as Celery spells it, which differs for a Unix socket and its database."""
    parts = urlsplit(redis_url)
    if parts.scheme != "unix":
        return redis_url
    options = [("virtual_host" if name == "db" else name, value) for name, value in parse_qsl(parts.query)]
    return parts._replace(scheme="redis+socket", query=urlencode(options)).geturl()


class Broker:
    """Redis client of the API. No method raises or blocks for long; without Redis, work starts later."""

    def __init__(self, settings: Settings) -> None:
        url = settings.redis_url or ""
        self._celery = celery_app(url)
        # Workers use the same settings to wait for hints, which takes longer than a sender may block.
        self._celery.conf.broker_transport_options["socket_timeout"] = _SEND_SECONDS
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="hints")
        self._redis: Redis = Redis.from_url(
            url,
            socket_connect_timeout=2,
            socket_timeout=5,
            health_check_interval=15,
            decode_responses=True,
            encoding_errors="replace",  # of whatever others publish
        )
        self._listeners: dict[str, Callable[[], None]] = {}
        self._pubsub: PubSub | None = None
        self._listening: asyncio.Task[None] | None = None
        self._closing = False
        self._counted_at = -_COUNT_SECONDS
        self._has_room = False
        self._is_unreachable = False

    async def start(self) -> None:
        """Start listening for wake-ups."""
        self._listening = asyncio.create_task(self._listen_forever(), name="wake-ups")

    async def close(self) -> None:
        """Stop listening and close every connection."""
        self._closing = True  # the client's own timeout around a read may swallow the cancellation
        if self._listening:
            await async_tasks.cancel_and_wait(self._listening)
        await self._redis.aclose()
        await asyncio.to_thread(self._sender.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._celery.close)

    async def wake_workers(self, count: int = 1) -> bool:
        """Notify `count` idle worker threads of pending runs; return False while the broker is unreachable."""
        try:
            # Hints do not expire: Celery would check that against the worker's clock, and a worker whose clock is ahead
            # would discard every hint. Instead, the number of waiting hints is limited here.
            now = time.monotonic()
            if now - self._counted_at >= _COUNT_SECONDS:
                self._has_room = await self._redis.llen(QUEUE) < MAX_NOTIFICATIONS
                self._counted_at, self._is_unreachable = now, False
            if self._has_room:
                await asyncio.get_running_loop().run_in_executor(self._sender, self._send_tasks, count)
        except Exception as error:  # for any error of the broker's client, the dispatcher sends hints again
            # Until the next check, no other call waits for a broker that hangs.
            self._has_room, self._is_unreachable = False, True
            log.warning("could not send a hint; the dispatcher will send it: %s", error)
        return not self._is_unreachable

    async def wake_streams(self, run_id: str) -> None:
        """Notify the streams of a run of new events."""
        await self._publish_message(events_channel(run_id), "")

    async def call_worker(self, run_id: str) -> None:
        """Notify a run's worker of a requested stop or action, which it would otherwise see at its next renewal."""
        await self._publish_message(CONTROL_CHANNEL, run_id)

    async def write_error(self) -> str | None:
        """Return why Redis cannot be written to, its own words if it refuses; None if it can."""
        try:
            # One that is full, read-only or without room for its own file responds, and takes no hints.
            await self._redis.set(_PROBE_KEY, "1", ex=60)
        except ResponseError as error:
            return f"Redis refuses writes ({error}): give it more memory or disk space"
        except (RedisError, OSError):
            return "Redis does not answer"
        return None

    @property
    def is_listening(self) -> bool:
        """True while the subscription is active; without it streams poll."""
        return self._pubsub is not None

    async def add_listener(self, run_id: str, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a run has new events, or may have had some that were missed."""
        self._listeners[events_channel(run_id)] = callback
        await self._change_subscription("subscribe", run_id)

    async def remove_listener(self, run_id: str) -> None:
        """Remove the callback of a run."""
        self._listeners.pop(events_channel(run_id), None)
        await self._change_subscription("unsubscribe", run_id)

    def _send_tasks(self, count: int) -> None:
        for _ in range(count if self._has_room else 0):
            self._celery.send_task(TASK, ignore_result=True, retry=False)

    async def _publish_message(self, channel: str, message: str) -> None:
        try:
            await self._redis.publish(channel, message)
        except (RedisError, OSError) as error:
            log.debug("could not publish a wake-up on %s: %s", channel, error)

    async def _change_subscription(self, verb: str, run_id: str) -> None:
        pubsub = self._pubsub
        if pubsub is None:
            return
        try:
            await getattr(pubsub, verb)(events_channel(run_id))
        except (RedisError, OSError) as error:
            log.debug("%s for %s failed; its streams poll instead: %s", verb, run_id, error)

    async def _listen_forever(self) -> None:
        while not self._closing:
            try:
                # Subscribe confirmations are not ignored here: an ignored one would look like a timeout, and a
                # timeout sends a ping.
                async with self._redis.pubsub() as pubsub:
                    # Subscribing to a fixed channel keeps the connection alive while no stream is open.
                    await pubsub.subscribe("anneal:api", *self._listeners)
                    self._pubsub = pubsub
                    self._call_all()
                    while not self._closing:
                        message: dict[str, Any] | None = await pubsub.get_message(timeout=15)
                        if message is None:
                            await pubsub.ping()
                        elif message["type"] == "message" and (callback := self._listeners.get(message["channel"])):
                            callback()
            except (RedisError, OSError, RuntimeError) as error:
                log.info("lost the wake-up subscription; streams poll until it is back: %s", error)
            finally:
                self._pubsub = None
            if not self._closing:
                await asyncio.sleep(1)

    def _call_all(self) -> None:
        """Call every callback once, because messages may have been missed while disconnected."""
        for callback in list(self._listeners.values()):
            callback()
