"""Listener for control messages of the API and of other workers."""

import logging
import threading
from collections.abc import Callable

from redis import Redis
from redis.exceptions import RedisError

from app.infra.broker import CONTROL_CHANNEL

log = logging.getLogger(__name__)

_REDIS_PAUSE = 2.0


class ControlListener:
    """Receives the names of runs and workers from a thread of its own, before the next regular renewal or heartbeat."""

    def __init__(self, redis: Redis, on_name: Callable[[str], None]) -> None:
        self._redis = redis
        self._on_name = on_name
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run_listener, name="control", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run_listener(self) -> None:
        while not self._ended.is_set():
            try:
                with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
                    pubsub.subscribe(CONTROL_CHANNEL)
                    while not self._ended.is_set():
                        if message := pubsub.get_message(timeout=0.5):
                            self._on_name(message["data"])
            except (RedisError, OSError) as error:
                log.info("control messages are unavailable, stop requests arrive with lease renewals: %s", error)
                self._ended.wait(_REDIS_PAUSE)
