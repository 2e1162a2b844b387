"""Outbox: an event has its deliveries if and only if it is committed, and none twice."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import Engine, delete, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from app.config import Settings
from app.infra.db import async_engine
from app.runs.events import feed
from app.runs.events.feed import number_events
from app.runs.state import machine
from app.runs.state.deletion import delete_runs
from app.tables.events import QueuedFeedEvent
from tests.app.webhooks.rows import add_webhook, deliveries, end_run
from tests.factories import Trainer
from tests.rows import add_run


@pytest.fixture
async def reading(settings: Settings) -> AsyncIterator[AsyncEngine]:
    reading = async_engine(settings.database_url or "")
    yield reading
    await reading.dispose()


async def number(reading: AsyncEngine) -> int:
    async with reading.begin() as connection:
        return await number_events(connection)


async def test_each_committed_event_of_the_types_of_a_webhook_is_enqueued_once(
    engine: Engine, reading: AsyncEngine
) -> None:
    ends, all_types = add_webhook(engine), add_webhook(engine, types=["status", "progress", "end"])
    add_webhook(engine, enabled=False)
    run_id, pending = end_run(engine, name="rank 8", tags=["llama"]), add_run(engine).id
    with engine.connect() as connection:
        connection.execute(machine.request_stop(pending, "checkpoint"))
        assert await number(reading) == 4, "the stop is not committed"
        connection.rollback()
    assert await number(reading) == 0
    (end,) = deliveries(engine, ends)
    assert (end.type, end.run_id, end.seq, end.status, end.attempts) == ("end", run_id, 3, "pending", 0)
    assert end.event["status"] == "cancelled" and end.run["name"] == "rank 8" and end.run["tags"] == ["llama"]
    assert end.run["finished_at"].endswith("Z")
    of_run = [(row.type, row.seq) for row in deliveries(engine, all_types) if row.run_id == run_id]
    assert sorted(of_run) == [("end", 3), ("status", 1), ("status", 2)]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(DISTINCT id) FROM webhook_deliveries")) == 5


@pytest.mark.parametrize(
    ("conditions", "is_sent"),
    [
        ({"tag": "llama"}, True), ({"tag": "qwen"}, False), ({"base_model": "none"}, True),
        ({"base_model": "other"}, False), ({"task": "train"}, True), ({"task": "export"}, False),
        ({"status": ["failed", "cancelled"]}, True), ({"status": ["failed"]}, False),
        ({"experiment_id": "exp_0"}, False), ({"tag": "llama", "task": "export"}, False),
    ],
)  # fmt: skip
async def test_only_events_that_meet_every_condition_of_the_filter_are_enqueued(
    engine: Engine, reading: AsyncEngine, conditions: dict[str, Any], is_sent: bool
) -> None:
    webhook = add_webhook(engine, filter=conditions)
    end_run(engine, tags=["python", "llama"])
    await number(reading)
    assert len(deliveries(engine, webhook)) == is_sent


async def test_status_condition_means_the_new_status_of_a_status_event(engine: Engine, reading: AsyncEngine) -> None:
    webhook = add_webhook(engine, types=["status"], filter={"status": ["running"]})
    Trainer(engine, add_run(engine).id).begin().complete()
    await number(reading)
    assert [row.event["to"] for row in deliveries(engine, webhook)] == ["running"]


async def test_events_from_before_the_webhook_as_an_import_brings_them_are_not_sent(
    engine: Engine, reading: AsyncEngine
) -> None:
    later = add_webhook(engine, created_at=text("now() + interval '2 hours'"))
    end_run(engine)
    assert await number(reading) == 3 and deliveries(engine, later) == []


async def test_end_of_a_run_that_is_deleted_before_the_feed_has_numbered_it_is_enqueued_once(
    engine: Engine, reading: AsyncEngine
) -> None:
    webhook, run_id = add_webhook(engine), end_run(engine)
    async with AsyncSession(reading) as session, session.begin():
        await delete_runs(session, [run_id])
    await number(reading)
    assert [row.run_id for row in deliveries(engine, webhook)] == [run_id]


async def test_text_that_jsonb_refuses_does_not_stop_the_feed(engine: Engine, reading: AsyncEngine) -> None:
    webhook = add_webhook(engine, types=["progress"])
    trainer = Trainer(engine, add_run(engine).id)
    trainer.events("progress", {"phase": "loading", "message": "a\x00b"})
    assert await number(reading) == 3
    assert [row.event["message"] for row in deliveries(engine, webhook)] == ["a\x00b"]


async def test_rounds_with_many_webhooks_are_smaller_so_that_none_takes_too_long(
    engine: Engine, reading: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_AT_ONCE", 4)
    webhooks = [add_webhook(engine) for _ in range(3)]
    end_run(engine)
    assert [await number(reading) for _ in range(4)] == [1, 1, 1, 0]
    assert [len(deliveries(engine, webhook)) for webhook in webhooks] == [1, 1, 1]


async def test_without_webhooks_no_event_is_read(engine: Engine, reading: AsyncEngine) -> None:
    """The plan of the statement for many events must not join them."""
    end_run(engine)
    with engine.begin() as connection:
        plan = connection.execute(text("EXPLAIN (ANALYZE, FORMAT TEXT) " + _numbering())).scalars().all()
        connection.execute(delete(QueuedFeedEvent))
    scans = [line for line in plan if "run_events" in line]
    assert scans and all("never executed" in line for line in scans)


def _numbering() -> str:
    return str(feed._NUMBER.text).replace(":limit", "100")
