"""What goes over Redis: hints that work waits, and wake-ups. None of it is the truth; all of it may get lost."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import Celery
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from app import background
from app.config import Settings

log = logging.getLogger(__name__)

QUEUE = "anneal"
TASK = "anneal.run_next"
MOST_HINTS = 1000
_COUNT_SECONDS = 1.0
_SEND_SECONDS = 5.0
CONTROL_CHANNEL = "anneal:control"


def events_channel(run_id: str) -> str:
    """Where a message says that a run has new events."""
    return f"anneal:run:{run_id}"


def celery_app(redis_url: str) -> Celery:
    """The Celery application, the same for those who send hints and those who take them.

    A hint is lost, doubled or late without harm: the pending row in Postgres is what counts. So hints are
    acknowledged at once, never redelivered (Redis redelivery would start long tasks twice), and have no result.
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
    """The broker's URL in the spelling that Celery understands."""
    return redis_url.replace("unix://", "redis+socket://", 1) if redis_url.startswith("unix://") else redis_url


class Queue:
    """The API's side of Redis. Nothing here raises or waits long: without Redis all still happens, only later."""

    def __init__(self, settings: Settings) -> None:
        url = settings.redis_url or ""
        self._celery = celery_app(url)
        # Workers wait for hints on the same settings for longer than a sender may.
        self._celery.conf.broker_transport_options["socket_timeout"] = _SEND_SECONDS
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="hints")
        self._redis: Redis = Redis.from_url(
            url, socket_connect_timeout=2, socket_timeout=5, health_check_interval=15, decode_responses=True
        )
        self._listeners: dict[str, Callable[[], None]] = {}
        self._pubsub: PubSub | None = None
        self._listening: asyncio.Task[None] | None = None
        self._closing = False
        self._counted_at = -_COUNT_SECONDS
        self._has_room = False
        self._is_away = False

    async def start(self) -> None:
        """Begin to listen for wake-ups."""
        self._listening = asyncio.create_task(self._listen(), name="wake-ups")

    async def close(self) -> None:
        """Stop listening and close every connection."""
        self._closing = True  # the client's own time-out around a read may swallow the cancellation
        if self._listening:
            await background.end(self._listening)
        await self._redis.aclose()
        await asyncio.to_thread(self._sender.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._celery.close)

    async def hint(self, count: int = 1) -> bool:
        """Tell `count` idle worker threads that work waits; False while the broker cannot be told."""
        try:
            # Hints do not expire: Celery would judge that by the worker's clock, and one that runs ahead would never
            # hear of anything. What nobody takes is bounded here instead.
            now = time.monotonic()
            if now - self._counted_at >= _COUNT_SECONDS:
                self._has_room = await self._redis.llen(QUEUE) < MOST_HINTS
                self._counted_at, self._is_away = now, False
            if self._has_room:
                await asyncio.get_running_loop().run_in_executor(self._sender, self._send, count)
        except Exception as error:  # whatever the broker's client raises, the next round of hints comes
            # Nobody else waits for a broker that hangs before it was asked once more.
            self._has_room, self._is_away = False, True
            log.warning("no hint sent, the dispatcher will: %s", error)
        return not self._is_away

    async def wake(self, run_id: str) -> None:
        """Tell readers of a run that it has new events."""
        await self._publish(events_channel(run_id), "")

    async def call_worker(self, run_id: str) -> None:
        """Tell the worker of a run that a stop or an action was asked for; its next renewal would tell it too."""
        await self._publish(CONTROL_CHANNEL, run_id)

    async def ping(self) -> bool:
        """Whether Redis answers."""
        try:
            return bool(await self._redis.ping())
        except (RedisError, OSError):
            return False

    @property
    def is_listening(self) -> bool:
        """Whether wake-ups reach us; without them streams poll."""
        return self._pubsub is not None

    async def listen(self, run_id: str, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a run has new events, or may have had some unheard."""
        self._listeners[events_channel(run_id)] = callback
        await self._subscription("subscribe", run_id)

    async def unlisten(self, run_id: str) -> None:
        """End what `listen` began."""
        self._listeners.pop(events_channel(run_id), None)
        await self._subscription("unsubscribe", run_id)

    def _send(self, count: int) -> None:
        for _ in range(count if self._has_room else 0):
            self._celery.send_task(TASK, ignore_result=True, retry=False)

    async def _publish(self, channel: str, message: str) -> None:
        try:
            await self._redis.publish(channel, message)
        except (RedisError, OSError) as error:
            log.debug("no wake-up on %s: %s", channel, error)

    async def _subscription(self, verb: str, run_id: str) -> None:
        pubsub = self._pubsub
        if pubsub is None:
            return
        try:
            await getattr(pubsub, verb)(events_channel(run_id))
        except (RedisError, OSError) as error:
            log.debug("%s for %s failed, polling covers it: %s", verb, run_id, error)

    async def _listen(self) -> None:
        while not self._closing:
            try:
                # Answers to our own commands count as messages here: passed over by the client, each looks like a
                # silence, which we end with a command.
                async with self._redis.pubsub() as pubsub:
                    # A subscription to one's own channel keeps the connection alive while no stream is open.
                    await pubsub.subscribe("anneal:api", *self._listeners)
                    self._pubsub = pubsub
                    self._call_all()
                    while not self._closing:
                        message: dict[str, Any] | None = await pubsub.get_message(timeout=15)
                        if message is None:
                            await pubsub.ping()
                        elif message["type"] == "message" and (heard := self._listeners.get(message["channel"])):
                            heard()
            except (RedisError, OSError, RuntimeError) as error:
                log.info("wake-ups are away, streams poll until they are back: %s", error)
            finally:
                self._pubsub = None
            if not self._closing:
                await asyncio.sleep(1)

    def _call_all(self) -> None:
        """After a gap in listening everybody looks once."""
        for callback in list(self._listeners.values()):
            callback()
