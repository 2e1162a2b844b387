"""Pause of the whole queue: no run starts, those that train go on, and what waits says why."""

import math
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine
from app.runs.queue.dispatcher import Dispatcher
from app.runs.queue.eta import _Predictions
from app.runs.queue.fit import Pause
from app.runs.queue.forecast import predict_starts
from app.runs.queue.holds_table import take_turn
from app.runs.queue.pause.service import pause_queue, resume_queue
from app.runs.queue.policy import Snapshot, schedule
from app.runs.queue.snapshot import read_forecast
from tests.app.runs.queue.test_policy import snapshots
from tests.properties import examples
from tests.rows import add_run, add_worker, claim, run_row, stored_holds
from tests.server import ApiServer
from tests.waiting import eventually

PAUSE = Pause(datetime(2026, 1, 2, tzinfo=UTC), "ada", "new cooling")


@given(snapshots())
@examples(20)
def test_no_run_starts_while_the_queue_is_paused_and_the_first_that_waits_for_devices_holds_them(
    queue: Snapshot,
) -> None:
    paused = replace(queue, fleet=replace(queue.fleet, pause=PAUSE))
    plan, plan_without_pause = schedule(paused), schedule(queue)
    assert plan.assignments == []
    assert {start.start for start in predict_starts(paused).values()} <= {math.inf}
    if plan_without_pause.holds and not plan_without_pause.assignments:
        # Otherwise runs behind it would take its devices as soon as the queue is resumed.
        assert plan_without_pause.holds == plan.holds


@pytest.fixture
async def own(settings: Settings) -> AsyncIterator[AsyncEngine]:
    own = async_engine(settings.database_url or "", pool_size=1)
    yield own
    await own.dispose()


async def pause(own: AsyncEngine, by: str = "ada", reason: str | None = "new cooling") -> None:
    async with AsyncSession(own) as session:
        await pause_queue(session, by, reason)
        await session.commit()


async def resume(own: AsyncEngine) -> None:
    async with AsyncSession(own) as session:
        await resume_queue(session)
        await session.commit()


async def test_claim_while_the_queue_is_paused_takes_no_run_and_the_first_one_afterwards(
    own: AsyncEngine, engine: Engine
) -> None:
    worker, first = add_worker(engine, devices=2), add_run(engine)
    await pause(own)
    urgent = add_run(engine, priority=1)
    assert claim(engine, worker) is None
    assert claim(engine, worker, only_run=(first.id, 0)) is None, "a worker of a cluster"
    await resume(own)
    assert [claim(engine, worker).id for _ in range(2)] == [urgent.id, first.id]


async def test_no_claim_that_began_before_the_pause_ends_after_it(own: AsyncEngine, engine: Engine) -> None:
    worker, run = add_worker(engine), add_run(engine)
    turn = engine.connect()
    take_turn(turn)
    claimed: list[Any] = []
    claiming = threading.Thread(target=lambda: claimed.append(claim(engine, worker)))
    claiming.start()
    waits = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    try:
        eventually(lambda: turn.scalar(waits) == 1)
        threading.Timer(0.2, turn.rollback).start()
        await pause(own)
        assert run_row(engine, run.id).status == "initializing", "it was claimed before the pause"
    finally:
        turn.close()
        claiming.join()
    assert claimed[0] is not None
    assert claim(engine, add_worker(engine)) is None


async def test_pending_run_says_who_has_paused_the_queue_and_holds_its_workers(
    own: AsyncEngine, settings: Settings, engine: Engine
) -> None:
    worker = add_worker(engine, devices=2, heartbeat_at=text("now() + interval '10 min'"))
    live = add_run(engine)
    claim(engine, worker)
    waits = add_run(engine, devices_needed=2, not_before=text("now() - interval '6 s'"))
    await pause(own)
    dispatcher = Dispatcher(own, Broker(settings), settings, ["fake"])
    assert (await dispatcher.round())[0] == 1, "the hint is sent, as to a worker that is busy"
    reason: Any = run_row(engine, waits.id).pending_reason
    assert reason["code"] == "queue_paused"
    for words in ("`ada` has paused the queue at 20", "(new cooling)", "`anneal queue resume`"):
        assert words in reason["message"]
    assert [hold.run_id for hold in stored_holds(engine).holds] == [waits.id]
    assert run_row(engine, live.id).status == "initializing"
    async with own.connect() as connection:
        forecast = await read_forecast(connection, settings, ["fake"])
    assert forecast is not None
    prediction = _Predictions(forecast).all()[waits.id]
    assert prediction.start_at is None and "`ada` has paused the queue" in prediction.basis
    await resume(own)
    dispatcher._plan_at = 0.0
    await dispatcher.round()
    assert run_row(engine, waits.id).pending_reason["code"] == "reserved"


def test_only_an_admin_pauses_and_resumes_and_both_are_audited(api: ApiServer) -> None:
    run = {"paused": False, "pause": None, "pending": 0, "live": 0}
    assert api.client.get("/v1/queue").json() == run
    with api.client_with(api.key_with(["read", "write"])) as writer:
        refused = [writer.post(f"/v1/queue/{call}", json={}) for call in ("pause", "resume")]
        assert {(answer.status_code, answer.json()["code"]) for answer in refused} == {(403, "scope_missing")}
        paused = api.client.post("/v1/queue/pause", json={"reason": "new cooling"}).json()
        assert paused["paused"] is True and paused["pause"]["reason"] == "new cooling" and paused["pause"]["paused_by"]
        assert writer.get("/v1/queue").json() == paused
    again = api.client.post("/v1/queue/pause", json={}).json()
    assert again["pause"]["reason"] is None and again["pause"]["paused_at"] > paused["pause"]["paused_at"]
    assert [api.client.post("/v1/queue/resume").json() for _ in range(2)] == [run, run]
    calls = [(one["route"], one["status"]) for one in api.client.get("/v1/audit").json()["data"]]
    expected = [("/v1/queue/resume", 200)] * 2 + [("/v1/queue/pause", 200)] * 2
    assert [call for call in calls if "queue" in call[0] and call[1] == 200] == expected
    assert api.client.post("/v1/queue/pause", json={"reason": ""}).status_code == 422
