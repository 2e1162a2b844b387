"""Live streams: one tail per source and process reads new events once and passes the same bytes to every reader."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from typing import Any

from prometheus_client import Histogram
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.infra import async_tasks
from app.infra.broker import Broker
from app.infra.logs.log_setup import run_context
from app.runs.events.frames import Batch, Frame
from app.runs.events.sources import RunSource, Source

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval at which a tail polls if no notification arrives (Redis down, a lost message)."""
KEEP_ALIVE_SECONDS = 15.0
RECHECK_SECONDS = 10.0
"""Interval at which the caller's access is checked again."""
_BATCH = 500
_BATCH_BYTES = 64 * 1024
"""Size at which a batch ends. A reader that reads nothing holds a batch and its encoding."""
_KEPT_BYTES = 512 * 1024
_READS_AT_A_TIME = 5
_GATHER_SECONDS = 0.05
_LAG_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0)


class Tail:
    """Single reader of a source's new events in this process; buffers the newest ones for all readers.

    A reader is only a position. A reader so slow that its next event is no longer buffered reads from Postgres until it
    has caught up, so slow readers never make the buffer grow.
    """

    def __init__(
        self,
        source: Source,
        position: int,
        read: Callable[[Source, int], Awaitable[Batch]],
        missed: Callable[[Source, int], Awaitable[Batch | None]],
        lag: Histogram,
    ) -> None:
        self.source = source
        self.position = position
        self.start = position
        """Position after which all events are buffered."""
        self.buffered: deque[tuple[int, Batch]] = deque()
        """Buffered batches, each with the position before it."""
        self.buffered_bytes = 0
        self.readers = 0
        self.is_over = False
        self.is_gone = False
        """True if the run was deleted: no more events follow, not even `end`."""
        self.wake = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._read = read
        self._missed = missed
        self._lag = lag

    async def follow_source(self) -> None:
        """Read and distribute events until a run ends or no reader is left."""
        ticking = asyncio.create_task(self._wake_periodically(), name=f"tick {self.source.channel}")
        # Check for missed events at once as well: a read may return nothing because an ended run was deleted.
        check_missed_at = time.monotonic()
        try:
            while self.readers:
                # Clear before reading: a notification that arrives during the read must lead to another read.
                self.wake.clear()
                try:
                    frames = await self._read(self.source, self.position)
                    if not frames and time.monotonic() >= check_missed_at:
                        check_missed_at = time.monotonic() + KEEP_ALIVE_SECONDS
                        missed = await self._missed(self.source, self.position)
                        if missed is None:
                            self.is_gone = True
                            return
                        frames = missed
                except (SQLAlchemyError, OSError) as error:
                    log.info("cannot read events of %s, retrying: %s", self.source.channel, error)
                    frames = Batch()
                if frames:
                    self._buffer_frames(frames)
                    if frames[-1].type == self.source.last_type:
                        return
                    if len(frames) == _BATCH or frames.size >= _BATCH_BYTES:
                        continue  # a full batch: there are probably more
                    # The first event is sent at once. Events that follow shortly after are sent together, because
                    # each read and each send costs far more than one additional event.
                    await asyncio.sleep(_GATHER_SECONDS)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), POLL_SECONDS)
        finally:
            await async_tasks.cancel_and_wait(ticking)

    def buffered_after(self, position: int) -> Batch:
        """Return the next buffered events for a reader at or after `start`; empty if it has seen all."""
        frames = Batch()
        for before, batch in reversed(self.buffered):
            if batch[-1].seq <= position:
                break
            frames = batch if before >= position else Batch(frame for frame in batch if frame.seq > position)
        return frames

    def wait_for_events(self) -> "asyncio.Future[None]":
        """Return a future that completes when there are new events, or after a short time without any."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        return waiting

    def wake_readers(self) -> None:
        """Wake all waiting readers."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _buffer_frames(self, frames: Batch) -> None:
        self.buffered.append((self.position, frames))
        self.buffered_bytes += frames.size
        self.position = frames[-1].seq
        while self.buffered_bytes > _KEPT_BYTES and len(self.buffered) > 1:
            _, dropped = self.buffered.popleft()
            self.buffered_bytes -= dropped.size
            self.start = dropped[-1].seq
        self.wake_readers()
        if frames.oldest is not None:
            # The trainer and this process have different clocks, so the difference can be negative.
            self._lag.observe(max(0.0, time.time() - frames.oldest.timestamp()))

    async def _wake_periodically(self) -> None:
        """Wake readers periodically, so that they send keep-alives even while the database does not respond."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.wake_readers()


class Reader:
    """Position of one subscriber, and the tail that it has joined."""

    __slots__ = ("position", "tail")

    def __init__(self, position: int) -> None:
        self.position = position
        self.tail: Tail | None = None


class Streams:
    """Registry of all tails and readers of this process."""

    def __init__(self, engine: AsyncEngine, queue: Broker) -> None:
        self._engine = engine
        self._queue = queue
        self._tails: dict[Source, Tail] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reading: dict[tuple[Source, int], asyncio.Task[Batch]] = {}
        self._readers: set[tuple[Source, Reader]] = set()
        self.lag = Histogram(
            "anneal_event_lag_seconds",
            "Seconds from an event to its delivery to live streams, for the oldest event of each batch.",
            buckets=_LAG_BUCKETS,
            registry=None,
        )
        # Readers that catch up must leave database connections to other requests.
        self._reads = asyncio.Semaphore(_READS_AT_A_TIME)

    async def close(self) -> None:
        """End all tails; their readers end with the server's shutdown."""
        for task in list(self._tasks):
            await async_tasks.cancel_and_wait(task)

    def measure_load(self) -> tuple[int, int, int]:
        """Return the number of live streams, of streams that catch up, and of read events not yet delivered."""
        live = backlog = 0
        for source, reader in self._readers:
            live += reader.tail is not None
            if tail := self._tails.get(source):
                backlog += max(0, tail.position - reader.position)
        return live, len(self._readers) - live, backlog

    async def read_stored(self, source: Source, after: int) -> Batch:
        """Return the next stored events after a cursor, encoded; concurrent equal calls share one query.

        A shared query may have started before the call and miss later commits; the tail delivers these.
        """
        place = (source, after)
        reading = self._reading.get(place)
        if reading is None:
            reading = self._reading[place] = self._start_read(source, after)
            reading.add_done_callback(lambda _: self._reading.pop(place))
        return await asyncio.shield(reading)

    async def read_now(self, source: Source, after: int) -> Batch:
        """Read like `read_stored`, but never share a query, so everything committed before the call is included."""
        return await asyncio.shield(self._start_read(source, after))

    def _start_read(self, source: Source, after: int) -> "asyncio.Task[Batch]":
        # A reader that disconnects during a query must not cancel it, which would invalidate its connection.
        reading = asyncio.create_task(self._read_source(source, after), name=f"read {source.channel}")
        self._tasks.add(reading)
        reading.add_done_callback(self._tasks.discard)
        return reading

    async def _read_source(self, source: Source, after: int) -> Batch:
        async with self._reads, self._engine.connect() as connection:
            return await source.read_batch(connection, after, _BATCH, _BATCH_BYTES)

    async def _read_missed(self, source: Source, position: int) -> Batch | None:
        async with self._reads, self._engine.connect() as connection:
            return await source.read_missed(connection, position)

    async def stream_batches(
        self,
        source: Source,
        after: int,
        *,
        until: int | None = None,
        is_selected: Callable[[Frame], bool] | None = None,
        keep_alive: float | None = None,
        still_allowed: Callable[[], Awaitable[bool]] | None = None,
    ) -> AsyncIterator[tuple[int, Batch]]:
        """Yield stored events after `after`, then live ones, as (cursor, frames), in order without gaps or duplicates.

        Only frames for which `is_selected` is true are included. If none was sent for `keep_alive` seconds, a batch
        with the cursor is yielded, or an empty batch if the cursor has not changed. Ends after the `end` event, at
        `until`, when the run is deleted, or when `still_allowed`, called about every 10 s, returns False.
        """
        keep_alive = KEEP_ALIVE_SECONDS if keep_alive is None else keep_alive
        reader = Reader(after)
        self._readers.add((source, reader))
        last_sent = last_checked = time.monotonic()
        reported = after
        try:
            while until is None or reader.position < until:
                frames = await self._next_batch(source, reader, waits=until is None or source.last_type is not None)
                if frames is None:
                    return
                now = time.monotonic()
                if frames:
                    if until is not None:
                        frames = Batch(frame for frame in frames if frame.seq <= until)
                    reader.position = frames[-1].seq if frames else until or reader.position
                    over = not frames or frames[-1].type == source.last_type
                    if is_selected is not None:
                        frames = Batch(frame for frame in frames if is_selected(frame))
                    if frames:
                        last_sent, reported = now, reader.position
                        yield reader.position, frames
                    if over:
                        return
                if not frames and now - last_sent >= keep_alive:
                    if reader.position > reported:
                        frames = Batch([source.cursor_frame(reader.position)])
                    last_sent, reported = now, reader.position
                    yield reader.position, frames
                if still_allowed and now - last_checked >= RECHECK_SECONDS:
                    last_checked = now
                    if not await still_allowed():
                        return
        finally:
            self._readers.discard((source, reader))
            self._leave_tail(reader)

    async def _next_batch(self, source: Source, reader: Reader, waits: bool) -> Batch | None:
        """Return the reader's next frames; empty after a short time without any.

        Returns None if the run was deleted, and, for a reader that does not wait, if no more events are stored.
        """
        tail = reader.tail
        if tail is not None and tail.start <= reader.position:
            if frames := tail.buffered_after(reader.position):
                return frames
            if tail.is_gone:
                return None
            if not tail.is_over:
                await tail.wait_for_events()
                return tail.buffered_after(reader.position) if tail.start <= reader.position else Batch()
        # The reader has no tail yet, is too slow for it, or the tail has ended.
        self._leave_tail(reader)
        if waits and self._join_tail(source, reader):
            return Batch()
        try:
            frames = await (self.read_stored if waits else self.read_now)(source, reader.position)
        except (SQLAlchemyError, OSError):
            await asyncio.sleep(POLL_SECONDS)
            return Batch()
        if not frames and not waits:
            return None
        if not frames and not self._join_tail(source, reader):
            self._start_tail(source, reader)
            if reader.tail is None:
                # The tail is ahead of the stored events. Never observed, but it would cause a busy loop.
                await asyncio.sleep(POLL_SECONDS)
        return frames

    def _join_tail(self, source: Source, reader: Reader) -> bool:
        """Join the tail if it buffers all events that the reader needs next; return False otherwise."""
        tail = self._tails.get(source)
        if tail is None or tail.start > reader.position:
            return False  # there is no tail, or it is too far ahead: read from Postgres
        tail.readers += 1
        reader.tail = tail
        return True

    def _start_tail(self, source: Source, reader: Reader) -> None:
        """Start a tail at the reader's position, which is at the end of the stored events."""
        if source in self._tails:
            return  # the reader is behind the existing tail: read from Postgres once more
        tail = self._tails[source] = Tail(source, reader.position, self.read_now, self._read_missed, self.lag)
        self._join_tail(source, reader)
        context = run_context(source.run_id) if isinstance(source, RunSource) else Context()
        task = asyncio.create_task(self._run_tail(tail), name=f"tail {source.channel}", context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _leave_tail(reader: Reader) -> None:
        tail, reader.tail = reader.tail, None
        if tail is not None:
            tail.readers -= 1
            if not tail.readers:
                tail.wake.set()

    async def _run_tail(self, tail: Tail) -> None:
        try:
            await self._queue.add_listener(tail.source.channel, tail.wake.set)
            await tail.follow_source()
        finally:
            # Remove the tail first, so that a reader that arrives now starts a new one and misses nothing.
            self._tails.pop(tail.source, None)
            tail.is_over = True
            tail.wake_readers()
            await self._queue.remove_listener(tail.source.channel)
