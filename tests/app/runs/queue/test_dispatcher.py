"""The loop that hands out waiting runs and takes back lost ones: no trouble of one job stops another."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine
from app.infra.ids import id_at
from app.runs.queue.dispatcher import Dispatcher
from app.runs.queue.fit import Fleet, Needs
from app.runs.state import machine
from tests.rows import add_key, add_run, add_worker, claim, events_of, run_row
from tests.waiting import eventually, eventually_async


@pytest.fixture
async def own(settings: Settings) -> AsyncIterator[AsyncEngine]:
    own = async_engine(settings.database_url or "", pool_size=1)
    yield own
    await own.dispose()


@pytest.fixture
def dispatcher(own: AsyncEngine, settings: Settings) -> Dispatcher:
    return Dispatcher(own, Broker(settings), settings)


@pytest.fixture(autouse=True)
def servers_that_are_up(engine: Engine, settings: Settings) -> None:
    """For longer than a lease: before that nothing is called lost."""

    def are_up() -> Any:
        with engine.connect() as connection:
            since = text("SELECT now() - pg_postmaster_start_time() > make_interval(secs => :lease)")
            return connection.scalar(since, {"lease": settings.lease_seconds})

    eventually(are_up)


async def next_round(dispatcher: Dispatcher) -> tuple[int, list[str]]:
    """Do a round that plans the queue again, however long the last plan took."""
    dispatcher._plan_at = 0.0
    return await dispatcher.round()


def lost_and_waiting(engine: Engine) -> tuple[str, str]:
    lost = add_run(engine).id
    claim(engine, add_worker(engine), lease=-1.0)
    return lost, add_run(engine).id


def drop_the_last_partition(connection: Any) -> str:
    """Leaves the dispatcher something to create; answers the id of a run of that month."""
    names = connection.scalars(text("SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r'")).all()
    last = max(name for name in names if name != "run_events_default" and name.startswith("run_events_2"))
    connection.execute(text(f"DROP TABLE {last}"))
    year, month = (int(part) for part in last.split("_")[2:])
    return id_at("run", datetime(year, month, 1, tzinfo=UTC) + timedelta(days=3))


async def test_one_round_takes_back_lost_runs_and_hints_waiting_ones(dispatcher: Dispatcher, engine: Engine) -> None:
    lost, _waiting = lost_and_waiting(engine)
    hints, moved = await dispatcher.round()
    assert moved == [lost]
    assert hints >= 1
    assert run_row(engine, lost).status == "pending"


async def test_round_of_an_idle_service_looks_once_for_pending_runs_and_the_next_one_sees_a_new_run(
    own: AsyncEngine, settings: Settings, engine: Engine
) -> None:
    patient = settings.model_copy(update={"lease_seconds": 60.0})  # an answer that takes half a lease counts as none
    dispatcher = Dispatcher(own, Broker(patient), patient)
    statements: list[str] = []
    event.listen(own.sync_engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    assert await dispatcher.round() == (0, [])
    assert [statement for statement in statements if "pending_runs" in statement]
    assert not [statement for statement in statements if "is_first" in statement or "run_timings.device" in statement]
    add_run(engine)
    assert await dispatcher.round() == (1, [])


async def test_a_run_that_cannot_start_says_why_once_and_again_when_it_changes(
    dispatcher: Dispatcher, engine: Engine
) -> None:
    run = add_run(engine, requirements={"memory_mb": 5000}).id
    assert await dispatcher.round() == (1, []), "a worker may be about to take it"
    with engine.begin() as connection:
        connection.execute(text("UPDATE runs SET not_before = now() - interval '6 s'"))
    assert [(await next_round(dispatcher))[1] for _ in range(2)] == [[run], []]
    add_worker(engine)
    assert [(await next_round(dispatcher))[1] for _ in range(2)] == [[run], []]
    stored = run_row(engine, run).pending_reason
    assert stored["code"] == "no_device_fits" and "asks for 5,000 MiB" in stored["message"]
    add_worker(engine, memory_mb=[8000])
    assert [(await next_round(dispatcher))[1] for _ in range(2)] == [[run], []]
    assert run_row(engine, run).pending_reason is None
    events = [(event.seq, event.data["code"]) for event in events_of(engine, run) if event.type == "pending"]
    assert events == [(2, "no_worker"), (3, "no_device_fits"), (4, "queued")]


async def test_a_run_that_waits_for_a_quota_has_no_event_for_each_run_that_starts_or_ends(
    dispatcher: Dispatcher, engine: Engine
) -> None:
    await dispatcher.round()  # the first one shortens leases as long as these: as if the clock had been set
    key, worker = add_key(engine, 3), add_worker(engine, devices=3)
    first = add_run(engine, created_by=key)
    claim(engine, worker)
    waits = add_run(engine, created_by=key, devices_needed=3).id
    with engine.begin() as connection:
        connection.execute(text("UPDATE runs SET not_before = now() - interval '6 s'"))
    assert [(await next_round(dispatcher))[1] for _ in range(2)] == [[waits], []]
    urgent = add_run(engine, created_by=key, priority=1)
    assert claim(engine, worker).id == urgent.id
    assert (await next_round(dispatcher))[1] == []
    with engine.begin() as connection:
        connection.execute(machine.complete(first.id, 1, None, "done")).one()
    assert (await next_round(dispatcher))[1] == []


async def test_workers_that_are_reserved_are_named_so_that_they_can_be_told_apart(
    own: AsyncEngine, settings: Settings, engine: Engine
) -> None:
    hosts = ("gpu-1", "vm", "vm")
    _, *alike = (add_worker(engine, host=host, group_address="10.0.0.1") for host in hosts)
    run = add_run(engine, devices_needed=3, hosts_needed=3).id
    with engine.begin() as connection:
        connection.execute(text("UPDATE runs SET not_before = now() - interval '6 s'"))
    patient = settings.model_copy(update={"lease_seconds": 60.0})  # a worker joins others for half a lease
    await Dispatcher(own, Broker(patient), patient, ["fake"]).round()
    first, second = sorted(alike)
    reason: Any = run_row(engine, run).pending_reason
    assert f"each of the workers gpu-1, vm ({first}), vm ({second}) is free." in reason["message"]


async def test_runs_that_need_the_same_are_judged_once_and_not_in_the_event_loop(
    dispatcher: Dispatcher, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[int | None, threading.Thread]] = []

    def record(needs: Needs, _fleet: Fleet) -> None:
        judged.append((needs.memory_mb, threading.current_thread()))

    monkeypatch.setattr("app.runs.queue.planning.pending_reason", record)
    for memory in (5000, 5000, 6000, 5000):
        add_run(engine, requirements={"memory_mb": memory})
    with engine.begin() as connection:
        connection.execute(text("UPDATE runs SET not_before = now() - interval '6 s'"))
    await dispatcher.round()
    assert sorted(memory for memory, _ in judged if memory) == [5000, 6000]
    assert threading.current_thread() not in {thread for _, thread in judged}


async def test_a_partition_that_cannot_be_created_stops_neither_hints_nor_reaping(
    dispatcher: Dispatcher, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    lost, _waiting = lost_and_waiting(engine)
    with engine.begin() as connection:
        later = drop_the_last_partition(connection)
        overlapping = f"FOR VALUES FROM ('{later}') TO ('{later}z')"
        connection.execute(text(f"CREATE TABLE another PARTITION OF run_events {overlapping}"))
    hints, moved = await dispatcher.round()
    assert (hints >= 1, moved) == (True, [lost])
    assert "creating partitions failed" in caplog.text
    next_lost = claim(engine, add_worker(engine), lease=-1.0).id
    assert (await dispatcher.round())[1] == [next_lost]  # nor is it taken for an absent database, which gives grace


async def test_a_partition_that_others_are_in_the_way_of_is_given_up_soon(
    dispatcher: Dispatcher, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    lost, _waiting = lost_and_waiting(engine)
    with engine.begin() as connection:
        drop_the_last_partition(connection)
    with engine.begin() as appending:
        appending.execute(text("LOCK TABLE run_events IN ROW EXCLUSIVE MODE"))
        began = time.monotonic()
        hints, moved = await dispatcher.round()
    assert (hints >= 1, moved) == (True, [lost])
    assert time.monotonic() - began < 10
    assert "creating partitions failed" in caplog.text


async def test_after_a_time_without_answers_leases_have_one_of_grace(
    dispatcher: Dispatcher, engine: Engine, own: AsyncEngine, settings: Settings
) -> None:
    """A server that hangs and goes on raises no error; what waited for it meanwhile runs before anyone renews."""
    silence = settings.lease_seconds / 2 + 0.1

    def hang(*_: Any) -> None:
        threading.Event().wait(silence)

    event.listen(own.sync_engine, "before_cursor_execute", hang, once=True)
    lost, _waiting = lost_and_waiting(engine)
    answered = time.monotonic()
    assert (await dispatcher.round())[1] == []
    assert (await dispatcher.round())[1] == []

    async def moved() -> list[str]:
        return (await dispatcher.round())[1]

    assert await eventually_async(moved) == [lost]
    assert time.monotonic() - answered >= silence + settings.lease_seconds


async def test_a_server_that_freezes_in_the_middle_of_a_round_gives_leases_one_of_grace_as_well(
    dispatcher: Dispatcher, engine: Engine, own: AsyncEngine, settings: Settings
) -> None:
    """Behind the lock, with a run whose worker could not renew meanwhile: neither this round nor the next takes it."""
    run_id = add_run(engine).id
    silence = settings.lease_seconds / 2 + 0.1

    def freeze(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "lease_expires_at" in statement and not frozen:
            frozen.append(time.monotonic())
            claim(engine, worker, lease=silence / 2)
            backend = psutil.Process(connection.connection.driver_connection.info.backend_pid)
            backend.suspend()
            threading.Timer(silence, backend.resume).start()

    frozen: list[float] = []
    worker = add_worker(engine)
    event.listen(own.sync_engine, "before_cursor_execute", freeze)
    assert (await dispatcher.round())[1] == [] and frozen
    assert (await dispatcher.round())[1] == []

    async def moved() -> list[str]:
        return (await dispatcher.round())[1]

    assert await eventually_async(moved) == [run_id]
    assert time.monotonic() - frozen[0] >= silence + settings.lease_seconds


async def test_after_a_time_without_writes_leases_have_one_of_grace_too(dispatcher: Dispatcher, engine: Engine) -> None:
    """As in a failover: the server answers, and takes no renewal from anybody."""
    lost, _ = lost_and_waiting(engine)
    with engine.begin() as connection:
        name = connection.scalar(text("SELECT current_database()"))
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
    try:
        assert await dispatcher.round() == (0, [])
    finally:
        with engine.connect() as connection:
            connection.execute(text("SET default_transaction_read_only = off"))
            connection.execute(text(f"ALTER DATABASE {name} RESET default_transaction_read_only"))
            connection.commit()
    assert (await dispatcher.round())[1] == []
    assert run_row(engine, lost).status == "initializing"


async def test_the_loop_survives_whatever_a_round_raises(
    dispatcher: Dispatcher, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0
    real = dispatcher.round

    async def round() -> tuple[int, list[str]]:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise KeyError("a mistake of ours")
        return await real()

    monkeypatch.setattr(dispatcher, "round", round)
    lost, _waiting = lost_and_waiting(engine)
    await dispatcher.start()
    try:

        async def taken_back() -> bool:
            return (await asyncio.to_thread(run_row, engine, lost)).status == "pending"

        assert await eventually_async(taken_back)
    finally:
        await dispatcher.stop()
        await dispatcher._queue.close()


async def test_a_hint_that_the_broker_could_not_take_is_sent_once_it_can(
    own: AsyncEngine, settings: Settings, engine: Engine
) -> None:
    """Marked as sent in the database, it would else come again only half a minute later."""

    class Away(Broker):
        reported: list[int]

        async def wake_workers(self, count: int = 1) -> bool:
            self.reported.append(count)
            return len(self.reported) > 2

    queue = Away(settings)
    queue.reported = []
    dispatcher = Dispatcher(own, queue, settings)
    add_run(engine)
    await dispatcher.start()
    try:

        async def was_sent() -> bool:
            return len(queue.reported) >= 3

        await eventually_async(was_sent, timeout=20)
    finally:
        await dispatcher.stop()
    assert len(set(queue.reported)) == 1, "as many as waited at first, each time"
