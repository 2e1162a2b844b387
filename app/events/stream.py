"""Live streams: one tail per run in this process reads new events once and hands the same bytes to every reader."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from app import background
from app.events.log import payload, read_after
from app.queue import Queue

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""How often a tail looks when no wake-up comes (Redis away, a lost message)."""
KEEP_ALIVE_SECONDS = 15.0
RECHECK_SECONDS = 10.0
"""How often it is asked whether the caller may still read."""
_BATCH = 500
_BUFFER_BYTES = 512 * 1024
_READS_AT_A_TIME = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """One event, encoded once for all readers."""

    seq: int
    type: str
    json: bytes

    @property
    def sse(self) -> bytes:
        """The frame of a `text/event-stream`."""
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self.seq, self.type.encode(), self.json)

    @property
    def line(self) -> bytes:
        """The same as a line of JSON, with the event's type in it."""
        return b'{"type":"%s",%s\n' % (self.type.encode(), self.json[1:])


class Reader:
    """One subscriber's place: attached to the tail with a bounded buffer, or reading from Postgres by itself."""

    __slots__ = ("attached", "buffer", "buffered_bytes", "position", "ready")

    def __init__(self, position: int) -> None:
        self.position = position
        self.attached = False
        self.buffer: deque[Frame] = deque()
        self.buffered_bytes = 0
        self.ready = asyncio.Event()

    def offer(self, frames: Sequence[Frame]) -> None:
        """Take new frames, or fall off the tail at once when the buffer is full; never waits."""
        self.ready.set()
        for frame in frames:
            if self.buffered_bytes > _BUFFER_BYTES:
                self.attached = False  # what is buffered is whole up to here; Postgres has the rest
                return
            if frame.seq > self.position:
                self.buffer.append(frame)
                self.buffered_bytes += len(frame.json)

    def take(self) -> list[Frame]:
        """Everything that is buffered."""
        frames = list(self.buffer)
        self.buffer.clear()
        self.buffered_bytes = 0
        return frames


class Tail:
    """The one reader of new events of a run in this process."""

    def __init__(self, run_id: str, position: int, read: Callable[[str, int], Awaitable[list[Frame]]]) -> None:
        self.run_id = run_id
        self.position = position
        self.readers: set[Reader] = set()
        self.wake = asyncio.Event()
        self._read = read

    async def follow(self) -> None:
        """Read and hand out until the run's end or until nobody is left."""
        while self.readers:
            # Cleared before reading: a wake-up that comes during the read must lead to another one.
            self.wake.clear()
            try:
                frames = await self._read(self.run_id, self.position)
            except (SQLAlchemyError, OSError) as error:
                log.info("events of %s cannot be read now, trying again: %s", self.run_id, error)
                frames = []
            if frames:
                self.position = frames[-1].seq
                for reader in list(self.readers):
                    reader.offer(frames)
                    if not reader.attached:
                        self.readers.discard(reader)
                if frames[-1].type == "end":
                    return
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), POLL_SECONDS)


class Streams:
    """All tails of this process."""

    def __init__(self, engine: AsyncEngine, queue: Queue) -> None:
        self._engine = engine
        self._queue = queue
        self._tails: dict[str, Tail] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        # Readers that catch up must not take every connection from the requests beside them.
        self._reads = asyncio.Semaphore(_READS_AT_A_TIME)

    async def close(self) -> None:
        """End every tail; their readers end with the server's shutdown."""
        for task in list(self._tasks):
            await background.end(task)

    async def read(self, run_id: str, after: int) -> list[Frame]:
        """The next stored events behind a cursor, encoded."""
        # A reader that hangs up in the middle of a query must not cost the connection that the query runs on.
        reading = asyncio.create_task(self._read(run_id, after), name=f"read {run_id}")
        self._tasks.add(reading)
        reading.add_done_callback(self._tasks.discard)
        return await asyncio.shield(reading)

    async def _read(self, run_id: str, after: int) -> list[Frame]:
        async with self._reads, self._engine.connect() as connection:
            rows = (await connection.execute(read_after(run_id, after, _BATCH))).all()
        return [Frame(seq, kind, payload(run_id, seq, ts, data).encode()) for seq, kind, ts, data in rows]

    async def batches(
        self,
        run_id: str,
        after: int,
        *,
        until: int | None = None,
        wanted: Callable[[Frame], bool] | None = None,
        keep_alive: float | None = None,
        still_allowed: Callable[[], Awaitable[bool]] | None = None,
    ) -> AsyncIterator[tuple[int, list[Frame]]]:
        """Events behind `after` in order, without gap or duplicate, then live ones, as (cursor, frames).

        Only those that are `wanted`. Frames are empty when there were none for `keep_alive` seconds, however much
        came that is not wanted. Ends after the `end` event, at `until`, or when `still_allowed`, asked about every
        10 s, says no.
        """
        keep_alive = KEEP_ALIVE_SECONDS if keep_alive is None else keep_alive
        reader = Reader(after)
        last_sent = last_checked = time.monotonic()
        try:
            while until is None or reader.position < until:
                frames = await self._next(run_id, reader)
                now = time.monotonic()
                if frames:
                    if until is not None:
                        frames = [frame for frame in frames if frame.seq <= until]
                    reader.position = frames[-1].seq if frames else until or reader.position
                    over = not frames or frames[-1].type == "end"
                    frames = [frame for frame in frames if wanted is None or wanted(frame)]
                    if frames:
                        last_sent = now
                        yield reader.position, frames
                    if over:
                        return
                if not frames and now - last_sent >= keep_alive:
                    last_sent = now
                    yield reader.position, []
                if still_allowed and now - last_checked >= RECHECK_SECONDS:
                    last_checked = now
                    if not await still_allowed():
                        return
        finally:
            self._detach(run_id, reader)

    async def _next(self, run_id: str, reader: Reader) -> list[Frame]:
        """What the reader has to see next; empty after a while without anything."""
        if reader.buffer:
            return reader.take()
        if reader.attached:
            reader.ready.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.ready.wait(), POLL_SECONDS)
            return reader.take()
        try:
            frames = await self.read(run_id, reader.position)
        except (SQLAlchemyError, OSError):
            await asyncio.sleep(POLL_SECONDS)
            return []
        if not frames:
            self._attach(run_id, reader)
        return frames

    def _attach(self, run_id: str, reader: Reader) -> None:
        """Join the tail, if the reader is level with it. Not a coroutine: nothing may happen between look and join."""
        tail = self._tails.get(run_id)
        if tail is None:
            tail = self._tails[run_id] = Tail(run_id, reader.position, self.read)
            tail.readers.add(reader)
            task = asyncio.create_task(self._run(tail), name=f"tail {run_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif tail.position > reader.position:
            return  # behind the tail: read from Postgres once more
        tail.readers.add(reader)
        reader.attached = True

    def _detach(self, run_id: str, reader: Reader) -> None:
        reader.attached = False
        tail = self._tails.get(run_id)
        if tail:
            tail.readers.discard(reader)
            if not tail.readers:
                tail.wake.set()

    async def _run(self, tail: Tail) -> None:
        try:
            await self._queue.listen(tail.run_id, tail.wake.set)
            await tail.follow()
        finally:
            # Off the table first: whoever comes now makes a new tail and loses nothing.
            self._tails.pop(tail.run_id, None)
            for reader in tail.readers:
                reader.attached = False
                reader.ready.set()
            await self._queue.unlisten(tail.run_id)
