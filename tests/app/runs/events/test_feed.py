"""Feed of all runs: every event once and in one order, whichever transaction commits first."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine

from anneal.client.client import Anneal, AsyncAnneal
from anneal.contracts.events import FEED_TYPES, EndEvent
from app.config import Settings
from app.infra.broker import ALL_RUNS, Broker
from app.infra.db import async_engine
from app.runs.events.feed import number_events
from app.runs.events.frames import Frame
from app.runs.events.log import NewEvent, append_events
from app.runs.events.sources import FeedSource
from app.runs.events.stream import Streams
from app.runs.state import machine
from tests.factories import Trainer, make_dataset, make_run
from tests.rows import add_run, add_worker, claim
from tests.server import ApiServer
from tests.waiting import eventually, eventually_async

PROGRESS = NewEvent.from_payload("progress", 0.0, {"phase": "loading", "done": 1, "total": None, "message": None})
LINE = NewEvent.from_payload("log", 0.0, {"line": "a line", "stream": "stdout", "level": "info"})


@pytest.fixture
async def reading(settings: Settings) -> AsyncIterator[AsyncEngine]:
    reading = async_engine(settings.database_url or "")
    yield reading
    await reading.dispose()


async def numbered(reading: AsyncEngine) -> int:
    async with reading.begin() as connection:
        return await number_events(connection)


async def read(reading: AsyncEngine, after: int = 0) -> list[Frame]:
    async with reading.connect() as connection:
        return await FeedSource().read_batch(connection, after, 500, 10**9)


def claimed_run(engine: Engine) -> str:
    run_id: str = add_run(engine).id
    assert claim(engine, add_worker(engine)).id == run_id
    return run_id


def stored(engine: Engine) -> list[tuple[str, int]]:
    query = text("SELECT run_id, seq FROM run_events WHERE type = ANY(:types) ORDER BY run_id, seq")
    with engine.connect() as connection:
        return [(run_id, seq) for run_id, seq in connection.execute(query, {"types": list(FEED_TYPES)})]


def place(frame: Frame) -> tuple[str, int]:
    data = json.loads(frame.json)
    assert data["cursor"] == frame.seq
    return data["run_id"], data["seq"]


async def test_what_is_committed_later_is_numbered_later_however_early_it_was_written(
    engine: Engine, reading: AsyncEngine
) -> None:
    slow, quick = claimed_run(engine), claimed_run(engine)
    assert await numbered(reading) == 4
    with engine.connect() as writing:
        append_events(writing, slow, 1, 1, [PROGRESS, LINE, PROGRESS])
        with engine.begin() as other:
            append_events(other, quick, 1, 1, [PROGRESS])
        assert await numbered(reading) == 1
        before = await read(reading)
        writing.commit()
    assert await numbered(reading) == 2 and await numbered(reading) == 0
    assert [place(frame) for frame in before[4:]] == [(quick, 3)]
    assert [place(frame) for frame in await read(reading, before[-1].seq)] == [(slow, 3), (slow, 5)]


async def test_readers_see_every_event_once_while_many_runs_write(
    engine: Engine, reading: AsyncEngine, settings: Settings
) -> None:
    queue = Broker(settings)
    streams = Streams(reading, queue)
    runs = [claimed_run(engine) for _ in range(6)]
    seen: list[list[Frame]] = [[], [], []]

    async def follow(frames: list[Frame]) -> None:
        async for _, batch in streams.stream_batches(FeedSource(), 0):
            frames += batch

    def write(run_id: str) -> None:
        for number in range(15):
            with engine.begin() as connection:
                append_events(connection, run_id, 1, 3 * number + 1, [PROGRESS, LINE, PROGRESS])
        with engine.begin() as connection:
            connection.execute(machine.complete(run_id, 1, None, "done"))

    async def number() -> None:
        while True:
            if await numbered(reading):
                await queue.wake_streams(ALL_RUNS)
            await asyncio.sleep(0.005)

    await queue.start()
    background = [asyncio.create_task(work) for work in (number(), *map(follow, seen))]
    try:
        await asyncio.gather(*(asyncio.to_thread(write, run_id) for run_id in runs))
        everything = stored(engine)
        assert len(everything) == 6 * (2 + 30 + 2)
        for frames in seen:
            await eventually_async(lambda frames=frames: _has(frames, len(everything)), what="all events arrive")
            assert sorted(map(place, frames)) == everything
            numbers = [frame.seq for frame in frames]
            assert numbers == sorted(numbers)
            for run_id in runs:
                own = [seq for run, seq in map(place, frames) if run == run_id]
                assert own == sorted(own)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await streams.close()
        await queue.close()


async def test_a_reader_of_what_is_stored_ends_although_the_newest_of_it_is_removed_meanwhile(
    engine: Engine, reading: AsyncEngine, settings: Settings
) -> None:
    claimed_run(engine)
    await numbered(reading)
    streams = Streams(reading, Broker(settings))
    async with asyncio.timeout(20):
        batches = [frames async for _, frames in streams.stream_batches(FeedSource(), 0, until=2**40)]
    assert [len(frames) for frames in batches] == [2]


async def _has(frames: list[Frame], count: int) -> bool:
    return len(frames) >= count


class TestEndpoint:
    @pytest.fixture
    def api(self, emptied_api: ApiServer) -> ApiServer:
        return emptied_api

    @pytest.fixture
    def settings(self, emptied_api: ApiServer) -> Settings:
        return emptied_api.settings

    def run(self, api: ApiServer, engine: Engine) -> Trainer:
        trainer = Trainer(engine, make_run(api.client, make_dataset(engine))["id"]).begin()
        trainer.log("a line")
        trainer.metric(1, loss=1.0)
        trainer.events("progress", {"phase": "evaluating", "done": 1, "total": 2, "message": None})
        return trainer

    def lines(self, api: ApiServer, **query: Any) -> list[dict[str, Any]]:
        answer = api.client.get("/v1/events", params={"follow": False, "format": "ndjson", **query})
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]

    def test_a_stream_that_starts_now_has_a_cursor_before_the_first_event(self, api: ApiServer, engine: Engine) -> None:
        first = self.run(api, engine)
        eventually(lambda: len(self.lines(api, after=0)) == 4, what="status three times, and progress")
        with api.client_with(api.key_with(["read"])) as client, client.stream("GET", "/v1/events") as answer:
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(5)][2:] == ["event: cursor", _matching(r'data: \{"cursor":\d+\}'), ""]
            first.complete()
            rest = [next(lines) for _ in range(8)]
        assert [line for line in rest if line.startswith("event")] == ["event: status", "event: end"]
        assert f'"run_id":"{first.run_id}"' in rest[2]

    def test_any_cursor_continues_behind_its_event(self, api: ApiServer, engine: Engine) -> None:
        first, second = self.run(api, engine).complete(), self.run(api, engine).fail()
        eventually(lambda: len(self.lines(api, after=0)) == 12)
        whole = self.lines(api, after=0)
        assert {line["run_id"] for line in whole} == {first.run_id, second.run_id}
        assert {line["type"] for line in whole} == set(FEED_TYPES)
        for number, line in enumerate(whole):
            assert self.lines(api, after=line["cursor"]) == whole[number + 1 :]
        ends = self.lines(api, after=0, types="end")
        assert [(line["type"], line["status"]) for line in ends] == [("end", "completed"), ("end", "failed")]
        answer = api.client.get("/v1/events?follow=false", headers={"Last-Event-ID": str(whole[-2]["cursor"])})
        assert re.findall(r"^id: (\d+)$", answer.text, re.MULTILINE) == [str(whole[-1]["cursor"])]
        assert self.lines(api, after=10**15) == []

    @pytest.mark.parametrize("query", [{"types": "log"}, {"types": ""}, {"after": -1}, {"after": "x"}, {"format": "x"}])
    def test_a_request_that_makes_no_sense_is_422(self, api: ApiServer, query: dict[str, Any]) -> None:
        assert api.client.get("/v1/events", params=query).status_code == 422

    def test_events_of_a_deleted_run_are_left_out(self, api: ApiServer, engine: Engine) -> None:
        first, second = self.run(api, engine).complete(), self.run(api, engine)
        eventually(lambda: len(self.lines(api, after=0)) == 10)
        assert api.client.delete(f"/v1/runs/{first.run_id}").status_code == 204
        eventually(lambda: {line["run_id"] for line in self.lines(api, after=0)} == {second.run_id})
        newest = self.lines(api, after=0)[-1]["cursor"]
        second.complete()
        eventually(lambda: [line["type"] for line in self.lines(api, after=newest)] == ["status", "end"])

    async def test_the_client_continues_after_a_cursor_and_after_the_end_of_a_run(
        self, api: ApiServer, engine: Engine
    ) -> None:
        def complete() -> str:
            return self.run(api, engine).complete().run_id

        runs = [await asyncio.to_thread(complete) for _ in range(2)]
        await asyncio.to_thread(eventually, lambda: len(self.lines(api, after=0)) == 12)
        async with AsyncAnneal(api.url, api.key) as client:
            whole = [event async for event in client.runs.all_events(after=0, follow=False)]
            assert [event.run_id for event in whole if isinstance(event, EndEvent)] == runs
            cursors = [event.cursor or 0 for event in whole]
            assert len(cursors) == 12 and cursors == sorted(set(cursors)) and cursors[0] > 0
            rest = client.runs.all_events(after=cursors[4])
            assert [(await anext(rest)).cursor for _ in range(7)] == cursors[5:]

    def test_the_client_starts_now_and_waits_for_what_it_chose(self, api: ApiServer, engine: Engine) -> None:
        first = self.run(api, engine)
        eventually(lambda: len(self.lines(api, after=0)) == 4)
        with Anneal(api.url, api.key) as client:
            assert list(client.runs.all_events(follow=False)) == []
            cursor = self.lines(api, after=0)[-1]["cursor"]
            first.complete()
            end = next(iter(client.runs.all_events(after=cursor, types=["end"])))
        assert isinstance(end, EndEvent) and (end.run_id, end.status) == (first.run_id, "completed")
        assert "cursor" not in end.model_copy(update={"cursor": None}).model_dump()


class _matching(str):
    """Equals every text that the pattern matches as a whole."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and re.fullmatch(str(self), other) is not None

    __hash__ = str.__hash__
