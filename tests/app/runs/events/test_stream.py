"""Streams: every reader sees every event once and in order, however it comes and however slowly it reads."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine, sync_engine
from app.runs.events import stream
from app.runs.events.frames import Batch, Frame
from app.runs.events.log import NewEvent, append_events
from app.runs.events.sources import RunSource, Source
from app.runs.events.stream import Streams
from app.runs.state import machine
from tests.rows import add_run, add_worker, claim
from tests.waiting import eventually_async


class Lab:
    """A live run, something that writes to it, and the streams of one API process."""

    def __init__(self, settings: Settings, engine: Engine, reading: AsyncEngine, queue: Broker) -> None:
        self.engine = engine
        self.queue = queue
        self.streams = Streams(reading, queue)
        self.run_id: str = add_run(engine).id
        self.source = RunSource(self.run_id)
        self.written = 0
        claim(engine, add_worker(engine))

    async def write(self, count: int, wake: bool = True, width: int = 10) -> None:
        new = [NewEvent.from_payload("log", 0.0, {"line": "x" * width}) for _ in range(count)]

        def store() -> None:
            with self.engine.begin() as connection:
                append_events(connection, self.run_id, 1, self.written + 1, new)

        await asyncio.to_thread(store)
        self.written += count
        if wake:
            await self.queue.wake_streams(self.run_id)

    async def end(self) -> None:
        def complete() -> None:
            with self.engine.begin() as connection:
                connection.execute(machine.complete(self.run_id, 1, None, "done"))

        await asyncio.to_thread(complete)
        await self.queue.wake_streams(self.run_id)

    async def read(
        self, after: int = 0, seen: list[int] | None = None, goes_on: asyncio.Event | None = None
    ) -> list[int]:
        """Follow to the end; `seen` shows how far it is. One that does not go on yet stands after its first batch."""
        seen = [] if seen is None else seen
        async for cursor, frames in self.streams.stream_batches(self.source, after):
            seen.extend(frame.seq for frame in frames)
            assert not frames or cursor == frames[-1].seq
            if goes_on:
                await goes_on.wait()
        return seen

    @property
    def whole(self) -> list[int]:
        return list(range(1, self.written + 5))  # two status events before, status and end behind


@pytest.fixture
async def lab(settings: Settings) -> AsyncIterator[Lab]:
    engine = sync_engine(settings.database_url or "")
    reading = async_engine(settings.database_url or "")
    queue = Broker(settings)
    await queue.start()
    lab = Lab(settings, engine, reading, queue)
    yield lab
    await lab.streams.close()
    await queue.close()
    await reading.dispose()
    engine.dispose()


async def test_forty_readers_that_come_at_any_time_see_everything_once(lab: Lab) -> None:
    readers = []
    for _ in range(40):
        readers.append(asyncio.create_task(lab.read()))
        await lab.write(25)
    await lab.end()
    for seen in await asyncio.wait_for(asyncio.gather(*readers), 60):
        assert seen == lab.whole


async def test_readers_lose_nothing_when_every_wake_up_is_lost(lab: Lab) -> None:
    readers = [asyncio.create_task(lab.read()) for _ in range(5)]
    for _ in range(3):
        await lab.write(10, wake=False)
    await lab.end()
    for seen in await asyncio.wait_for(asyncio.gather(*readers), 60):
        assert seen == lab.whole


async def test_a_reader_continues_behind_its_cursor_without_seam(lab: Lab) -> None:
    await lab.write(30)
    first = []
    async for _, frames in lab.streams.stream_batches(lab.source, 0):
        first += [frame.seq for frame in frames]
        break
    rest = asyncio.create_task(lab.read(after=first[-1]))
    await lab.write(30)
    await lab.end()
    assert first + await asyncio.wait_for(rest, 30) == lab.whole


async def test_a_slow_reader_holds_a_bounded_buffer_and_delays_no_other(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_KEPT_BYTES", 20_000)
    slow, quick, largest, goes_on = [], [], 0, asyncio.Event()
    slow_reading = asyncio.create_task(lab.read(seen=slow, goes_on=goes_on))
    quick_reading = asyncio.create_task(lab.read(seen=quick))
    await eventually_async(lambda: _level(quick, 2))
    for n in range(1, 31):
        await lab.write(20, width=500)
        await eventually_async(lambda n=n: _level(quick, 2 + 20 * n), what="the quick reader keeps up")
        for tail in lab.streams._tails.values():
            largest = max(largest, tail.buffered_bytes)
    assert 0 < len(slow) < len(quick) / 2
    goes_on.set()
    await lab.end()
    assert await asyncio.wait_for(quick_reading, 30) == lab.whole
    assert await asyncio.wait_for(slow_reading, 60) == lab.whole
    assert largest < 20_000 + 2000


async def test_a_reader_far_ahead_of_the_log_costs_the_others_nothing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    read = lab.streams._read_source

    async def counted(source: Source, after: int) -> Batch:
        nonlocal reads
        reads += 1
        return await read(source, after)

    monkeypatch.setattr(lab.streams, "_read_source", counted)
    ahead = asyncio.create_task(lab.read(after=2**62))
    await eventually_async(lambda: asyncio.sleep(0, lab.streams._tails))
    seen: list[int] = []
    reading = asyncio.create_task(lab.read(seen=seen))
    await eventually_async(lambda: asyncio.sleep(0, len(seen) == 2))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(reading), 1.0)
    assert reads < 12
    await lab.end()
    assert await reading == lab.whole
    ahead.cancel()


async def test_tail_is_shared_by_all_readers_and_ends_with_the_last(lab: Lab) -> None:
    readers = [asyncio.create_task(lab.read()) for _ in range(10)]
    await eventually_async(lambda: _attached(lab, 10))
    assert len(lab.streams._tails) == 1
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await eventually_async(lambda: _nothing_left(lab))


async def test_a_batch_ends_at_its_size_in_bytes_and_has_at_least_one_event(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_BATCH_BYTES", 20_000)
    await lab.write(30, width=6000)
    batches = [frames async for _, frames in lab.streams.stream_batches(lab.source, 0, until=32)]
    assert [frame.seq for frames in batches for frame in frames] == list(range(1, 33))
    assert all(frames.size < 20_000 + 6200 for frames in batches) and len(batches) < 10
    await lab.write(1, width=30_000)
    (alone,) = await lab.streams.read_stored(lab.source, 32)
    assert alone.seq == 33


async def test_silence_is_answered_with_the_cursor(lab: Lab) -> None:
    batches = lab.streams.stream_batches(lab.source, 0, keep_alive=0.1)
    _, first = await anext(batches)
    assert [frame.seq for frame in first] == [1, 2]
    assert await anext(batches) == (2, [])


async def test_a_reader_who_wants_little_hears_the_cursor_while_much_else_flows(lab: Lab) -> None:
    batches = lab.streams.stream_batches(lab.source, 0, is_selected=lambda frame: frame.type == "end", keep_alive=0.3)

    async def flow() -> None:
        while True:
            await lab.write(3)
            await asyncio.sleep(0.02)

    flowing = asyncio.create_task(flow())
    heard = [await asyncio.wait_for(anext(batches), 10) for _ in range(3)]
    flowing.cancel()
    cursors = [reached for reached, _ in heard]
    assert cursors == sorted(set(cursors)) and cursors[0] > 2
    sent = b'id: %d\nevent: cursor\ndata: {"run_id":"%s","seq":%d}\n\n'
    assert [frames.sse for _, frames in heard] == [sent % (seq, lab.run_id.encode(), seq) for seq in cursors]
    await lab.end()
    rest = [frame.type async for _, frames in batches for frame in frames]
    assert [kind for kind in rest if kind != "cursor"] == ["end"]


async def test_a_caller_who_may_no_longer_read_is_cut_off(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "RECHECK_SECONDS", 0.0)

    async def no() -> bool:
        return False

    seen = [frames async for _, frames in lab.streams.stream_batches(lab.source, 0, still_allowed=no)]
    assert len(seen) <= 1


def test_a_frame_is_the_event_stream_form_and_a_line_of_json() -> None:
    frame = Frame(7, "log", b'{"run_id":"run_x","seq":7,"line":"a"}')
    assert frame.sse == b'id: 7\nevent: log\ndata: {"run_id":"run_x","seq":7,"line":"a"}\n\n'
    assert frame.line == b'{"type":"log","run_id":"run_x","seq":7,"line":"a"}\n'


async def _level(seen: list[int], count: int) -> bool:
    return len(seen) >= count


async def _attached(lab: Lab, count: int) -> bool:
    return sum(tail.readers for tail in lab.streams._tails.values()) == count


async def _nothing_left(lab: Lab) -> bool:
    return not lab.streams._tails and not lab.streams._tasks
