"""Budget of device-hours a month of a key: once it is used, no run of the key starts, and those that train go on."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine
from app.runs.queue import dispatcher
from app.runs.queue.dispatcher import Dispatcher
from app.runs.queue.fit import budget_reason
from app.runs.queue.forecast import predict_starts
from app.runs.queue.snapshot import read_forecast
from app.runs.state import machine
from app.tables.usage import count_budgets
from tests.rows import add_key, add_run, add_worker, claim, run_row

FIRST_USE = 1e-7
"""Device-hours that a run has used as soon as it was claimed."""


@pytest.fixture
async def own(settings: Settings) -> AsyncIterator[AsyncEngine]:
    own = async_engine(settings.database_url or "", pool_size=1)
    yield own
    await own.dispose()


def execute(engine: Engine, statement: Any, **values: Any) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement) if isinstance(statement, str) else statement, values)


def set_budget(engine: Engine, key: str, hours: float | None) -> None:
    limits = "UPDATE api_keys SET max_device_hours = :hours, max_devices = NULL WHERE id = :key"
    execute(engine, limits, hours=hours, key=key)


def budget_seconds(engine: Engine) -> float:
    with engine.connect() as connection:
        return float(connection.scalar(text("SELECT budget_seconds FROM api_keys")) or 0.0)


def uncounted(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(text("SELECT count(*) FROM run_attempts WHERE NOT is_counted")) or 0)


async def test_key_that_has_used_its_budget_starts_no_run_until_it_is_raised_or_renewed(
    own: AsyncEngine, settings: Settings, engine: Engine
) -> None:
    key, worker = add_key(engine, 8), add_worker(engine, devices=8, heartbeat_at=text("now() + interval '10 min'"))
    set_budget(engine, key, FIRST_USE)
    live = add_run(engine, created_by=key)
    assert claim(engine, worker).id == live.id
    earlier = text("now() - interval '6 s'")
    pending = [add_run(engine, created_by=key, devices_needed=devices, not_before=earlier) for devices in (1, 2)]
    other = add_run(engine, priority=-1)
    await Dispatcher(own, Broker(settings), settings, ["fake"]).round()
    assert [claim(engine, worker).id, claim(engine, worker)] == [other.id, None]
    assert run_row(engine, live.id).status == "initializing"
    for run in pending:
        reason: Any = run_row(engine, run.id).pending_reason
        assert reason["code"] == "budget" and f"`anneal keys edit {key} --max-device-hours`" in reason["message"]
    async with own.connect() as connection:
        forecast = await read_forecast(connection, settings, ["fake"])
    assert forecast is not None
    forecast.ends.update({live.id: 5.0, other.id: 5.0})
    assert {start.start for start in predict_starts(forecast.snapshot()).values()} == {math.inf}
    set_budget(engine, key, 1.0)
    assert claim(engine, worker).id == pending[0].id, "it is raised"
    set_budget(engine, key, FIRST_USE)
    execute(engine, count_budgets())
    assert claim(engine, worker) is None
    execute(engine, "UPDATE api_keys SET budget_month = budget_month - interval '1 month'")
    assert claim(engine, worker).id == pending[1].id, "another month has begun"


async def test_budget_counts_the_part_of_an_attempt_in_the_month_once_and_live_ones_until_now(
    own: AsyncEngine, settings: Settings, engine: Engine
) -> None:
    key, worker = add_key(engine, 8), add_worker(engine, heartbeat_at=text("now() + interval '10 min'"))
    set_budget(engine, key, 100.0)
    add_run(engine, created_by=key)
    ended = claim(engine, worker)
    month = "date_trunc('month', now(), 'UTC')"
    execute(engine, machine.complete(ended.id, ended.lease_epoch, None, "done"))
    around_its_start = f"started_at = {month} - interval '2 h', ended_at = {month} + interval '1 h'"
    execute(engine, f"UPDATE run_attempts SET {around_its_start}")
    await Dispatcher(own, Broker(settings), settings, ["fake"]).round()
    assert budget_seconds(engine) == 3600.0
    execute(engine, f"UPDATE run_attempts SET ended_at = {month} + interval '5 h'")
    execute(engine, count_budgets())
    assert budget_seconds(engine) == 3600.0, "an attempt is read until it is counted"
    add_run(engine, created_by=key)
    claim(engine, worker)
    execute(engine, count_budgets())
    assert 3600.0 < budget_seconds(engine) < 7000.0


async def test_history_that_is_not_counted_is_counted_in_several_rounds_before_budgets_are(
    own: AsyncEngine, settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, worker = add_key(engine, 8), add_worker(engine, heartbeat_at=text("now() + interval '10 min'"))
    set_budget(engine, key, 100.0)
    for _ in range(3):
        add_run(engine, created_by=key)
        run = claim(engine, worker)
        execute(engine, machine.complete(run.id, run.lease_epoch, None, "done"))
    monkeypatch.setattr(dispatcher, "_ATTEMPTS_AT_ONCE", 2)
    rounds = Dispatcher(own, Broker(settings), settings, ["fake"])
    await rounds.round()
    assert uncounted(engine) == 1 and budget_seconds(engine) == 0.0
    await rounds.round()
    assert uncounted(engine) == 0 and budget_seconds(engine) > 0.0


def test_budget_of_none_lets_no_run_start_and_a_key_without_a_budget_counts_nothing(engine: Engine) -> None:
    key, worker = add_key(engine, 8), add_worker(engine, devices=2)
    add_run(engine, created_by=key)
    set_budget(engine, key, 0.0)
    assert claim(engine, worker) is None
    set_budget(engine, key, None)
    assert claim(engine, worker) is not None
    execute(engine, count_budgets())
    assert budget_seconds(engine) == 0.0


def test_message_has_what_is_used_in_steps_and_when_the_budget_is_renewed() -> None:
    messages = {budget_reason("key_1", 40.0, used, "2026-12-01").message for used in (44.0, 47.9)}
    (message,) = messages
    assert "at least 44 of its 40 device-hours" in message and "before 2026-12-01 00:00 UTC" in message
