"""The clock of the database's host is set while runs train and wait: nothing is lost, and nothing waits longer."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine, sync_engine
from app.runs.queue.dispatcher import Dispatcher
from app.runs.state import machine, parts
from tests.rows import add_run, add_worker, claim, hold_workers, run_row
from tests.waiting import eventually, eventually_async

SetClock = Callable[[str], None]
JUMPS = ["120 s", "200 days", "-1 hour"]


@pytest.fixture
def engine(settings: Settings) -> Any:
    """Connections whose statements read the time from functions that can be set, like PostgreSQL reads its host's."""
    owner = sync_engine(settings.database_url or "", pool_size=0)
    with owner.begin() as connection:
        name = connection.scalar(text("SELECT current_database()"))
        connection.execute(text("CREATE SCHEMA host"))
        connection.execute(text("CREATE TABLE host.clock AS SELECT interval '0' AS ahead"))
        for function in ("now", "clock_timestamp"):
            connection.execute(
                text(
                    f"CREATE FUNCTION host.{function}() RETURNS timestamptz LANGUAGE sql VOLATILE "
                    f"AS 'SELECT pg_catalog.{function}() + ahead FROM host.clock'"
                )
            )
        connection.execute(text(f"ALTER DATABASE {name} SET search_path = host, pg_catalog, public"))
    engine = sync_engine(settings.database_url or "")
    yield engine
    engine.dispose()
    owner.dispose()


@pytest.fixture
def set_clock(engine: Engine) -> SetClock:
    def set_clock(ahead: str) -> None:
        with engine.begin() as connection:
            connection.execute(text("UPDATE host.clock SET ahead = cast(:ahead AS interval)"), {"ahead": ahead})

    return set_clock


@pytest.fixture
async def own(engine: Engine, settings: Settings) -> AsyncIterator[AsyncEngine]:
    own = async_engine(settings.database_url or "", pool_size=1)
    yield own
    await own.dispose()


@pytest.fixture
async def dispatcher(own: AsyncEngine, engine: Engine, settings: Settings) -> Dispatcher:
    def is_up() -> Any:
        with engine.connect() as connection:
            since = text("SELECT pg_catalog.now() - pg_postmaster_start_time() > make_interval(secs => :lease)")
            return connection.scalar(since, {"lease": settings.lease_seconds})

    eventually(is_up)
    dispatcher = Dispatcher(own, Broker(settings), settings)
    await dispatcher.round()
    return dispatcher


async def follow_clock(dispatcher: Dispatcher) -> None:
    """The round that notices the change does nothing, and the next one follows it."""
    for _ in range(2):
        assert (await dispatcher.round())[1] == []


def state_of(engine: Engine, run_id: str) -> tuple[str, int]:
    row = run_row(engine, run_id)
    return row.status, row.lost_count


class TestALease:
    @pytest.mark.parametrize("jump", JUMPS)
    async def test_does_not_run_out_but_counts_again_from_the_jump(
        self, dispatcher: Dispatcher, engine: Engine, settings: Settings, set_clock: SetClock, jump: str
    ) -> None:
        run, worker = add_run(engine).id, add_worker(engine)
        claim(engine, worker, lease=settings.lease_seconds)
        set_clock(jump)
        jumped = time.monotonic()
        assert (await dispatcher.round())[1] == []
        assert state_of(engine, run) == ("initializing", 0)
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT state FROM workers")) == "online"

        async def moved() -> list[str]:
            return (await dispatcher.round())[1]

        assert await eventually_async(moved) == [run], "its worker, which renews nothing, is lost"
        assert settings.lease_seconds <= time.monotonic() - jumped < 10 * settings.lease_seconds

    async def test_lasts_through_jumps_one_after_the_other_seen_by_two_replicas(
        self, dispatcher: Dispatcher, own: AsyncEngine, engine: Engine, settings: Settings, set_clock: SetClock
    ) -> None:
        other = Dispatcher(own, Broker(settings), settings)
        await other.round()
        run = add_run(engine).id
        row = claim(engine, add_worker(engine), lease=settings.lease_seconds)
        for jump in ("120 s", "240 s", "-1 hour", "0"):
            set_clock(jump)
            assert [(await one.round())[1] for one in (dispatcher, other)] == [[], []]
            with engine.begin() as connection:
                renewal = machine.renew(run, row.lease_epoch, settings.lease_seconds)
                assert connection.execute(renewal).one_or_none() is not None
        assert state_of(engine, run) == ("initializing", 0)

    async def test_of_a_part_does_not_run_out_and_the_lead_notices_nothing(
        self, dispatcher: Dispatcher, engine: Engine, set_clock: SetClock
    ) -> None:
        run = add_run(engine, devices_needed=2, hosts_needed=2).id
        lead, member = (add_worker(engine, group_address="10.0.0.1") for _ in range(2))
        hold_workers(engine, run, lead, member)
        row = claim(engine, lead)
        set_clock("200 days")
        with engine.begin() as connection:
            assert connection.execute(machine.renew(run, row.lease_epoch, 60)).one().parts is None
        await follow_clock(dispatcher)
        with engine.begin() as connection:
            assert connection.execute(parts.renew(run, row.lease_epoch, 1, 60)).all() != []

    async def test_is_corrected_in_the_next_round_if_the_commit_fails(
        self, dispatcher: Dispatcher, own: AsyncEngine, engine: Engine, settings: Settings, set_clock: SetClock
    ) -> None:
        add_run(engine)
        claim(engine, add_worker(engine), lease=settings.lease_seconds)
        set_clock("-1 hour")
        await dispatcher.round()

        def fail(_: object) -> None:
            raise RuntimeError("the connection is lost")

        event.listen(own.sync_engine, "commit", fail, once=True)
        for is_corrected in (False, True):
            await dispatcher.round()
            with engine.connect() as connection:
                left = connection.scalar(text("SELECT extract(epoch FROM lease_expires_at - now()) FROM runs"))
            assert (float(left) <= settings.lease_seconds) is is_corrected


class TestAPendingRun:
    @pytest.mark.parametrize("is_running", [True, False], ids=["api-runs", "api-starts-later"])
    async def test_waits_no_longer_when_the_clock_is_set_back(
        self,
        own: AsyncEngine,
        dispatcher: Dispatcher,
        engine: Engine,
        settings: Settings,
        set_clock: SetClock,
        is_running: bool,
    ) -> None:
        worker = add_worker(engine)
        retried = claim(engine, worker) if add_run(engine) else None
        assert retried is not None
        with engine.begin() as connection:
            connection.execute(machine.retry(retried.id, retried.lease_epoch, "lost", 3.0))
            connection.execute(text("UPDATE runs SET notified_at = now()"))
        created = add_run(engine).id
        set_clock("-1 hour")
        loop = dispatcher if is_running else Dispatcher(own, Broker(settings), settings)
        await follow_clock(loop)
        began = time.monotonic()
        assert claim(engine, worker).id == created
        with engine.begin() as connection:
            connection.execute(machine.complete(created, 1, None, "done")).one()
        again = eventually(lambda: claim(engine, worker))
        assert again.id == retried.id
        assert 1 < time.monotonic() - began < 30, "the rest of its pause"
        assert (await loop.round())[1] == []

    async def test_that_was_queued_while_the_clock_was_ahead_waits_no_longer(
        self, dispatcher: Dispatcher, engine: Engine, set_clock: SetClock
    ) -> None:
        add_run(engine)
        worker = add_worker(engine)
        row = claim(engine, worker)
        set_clock("200 days")
        with engine.begin() as connection:
            connection.execute(machine.retry(row.id, row.lease_epoch, "lost", 0.0))
        await follow_clock(dispatcher)
        set_clock("0")
        assert claim(engine, worker) is None
        await follow_clock(dispatcher)
        assert claim(engine, worker).id == row.id


async def test_a_paused_device_is_not_paused_for_longer(
    dispatcher: Dispatcher, engine: Engine, set_clock: SetClock
) -> None:
    worker = add_worker(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE devices SET paused_until = now() + interval '1 min'"))
    set_clock("-1 hour")
    await follow_clock(dispatcher)
    with engine.connect() as connection:
        left = connection.scalar(text("SELECT extract(epoch FROM paused_until - now()) FROM devices"))
    assert 0 < float(left) <= 60
    assert worker


async def test_the_usage_of_devices_neither_grows_nor_is_an_error(
    dispatcher: Dispatcher, engine: Engine, set_clock: SetClock
) -> None:
    run = add_run(engine, created_by="someone")
    claim(engine, add_worker(engine))
    set_clock("2000 days")
    dispatcher._account_at = 0.0
    await dispatcher.round()
    set_clock("0")
    dispatcher._account_at = 0.0
    await dispatcher.round()
    with engine.connect() as connection:
        used = connection.scalar(text("SELECT device_seconds FROM device_usage WHERE owner = 'someone'"))
    assert 0 <= float(used) < 60
    add_run(engine, created_by="someone")
    assert claim(engine, add_worker(engine)).id != run.id
