"""Publisher of a worker: notifies event streams and other workers through Redis."""

import logging
import threading

from redis import Redis
from redis.exceptions import RedisError

from app.infra.broker import CONTROL_CHANNEL, events_channel

log = logging.getLogger(__name__)

_REDIS_PAUSE = 2.0


class Publisher:
    """Publishes from a thread of its own, so that no caller ever waits; without Redis, all who would listen poll."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._waiting: set[tuple[str, str]] = set()
        """Channels and messages."""
        self._wake_up = threading.Event()
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run_publisher, name="wake-ups", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._wake_up.set()

    def wake_streams(self, run_id: str) -> None:
        """Notify event streams of new events; without Redis they poll."""
        self._publish_later(events_channel(run_id), "")

    def signal_control(self, name: str) -> None:
        """Have the leases on a run renewed at once by the workers that hold one, or a worker look for parts to train.

        `name` is the id of the run or of the worker. Without Redis, the next renewal or heartbeat does the same.
        """
        self._publish_later(CONTROL_CHANNEL, name)

    def _publish_later(self, channel: str, message: str) -> None:
        self._waiting.add((channel, message))
        self._wake_up.set()

    def _run_publisher(self) -> None:
        while not self._ended.is_set():
            self._wake_up.wait()
            self._wake_up.clear()
            # Popped one at a time: what other threads add meanwhile is handled in the next round.
            while self._waiting:
                channel, message = self._waiting.pop()
                try:
                    self._redis.publish(channel, message)
                except (RedisError, OSError) as error:
                    log.info("event streams and workers are not notified for now: %s", error)
                    self._ended.wait(_REDIS_PAUSE)
