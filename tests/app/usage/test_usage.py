"""Usage of devices: each attempt counts as long as it had its devices, also that of a lost or deleted run."""

import asyncio
from collections.abc import AsyncIterator
from datetime import date
from typing import Any, get_args

import pytest
from sqlalchemy import Engine, insert, text
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.schemas.runs.usage import UsageBy, UsageRead
from app.config import Settings
from app.infra.db import async_engine
from app.runs.state import machine
from app.runs.state.deletion import delete_runs
from app.tables.runs import Attempt, AttemptTimings
from app.tables.usage import count_attempts
from app.usage.service import read_usage, usage_query
from tests.conftest import Anneal, json_of
from tests.rows import add_key, add_run, add_worker, claim, count_usage, waiting_for_locks
from tests.server import ApiServer
from tests.waiting import eventually

YEAR = (date(2026, 1, 1), date(2027, 1, 1))
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
async def session(settings: Settings) -> AsyncIterator[AsyncSession]:
    own = async_engine(settings.database_url or "", pool_size=1)
    async with AsyncSession(own, expire_on_commit=False) as session:
        yield session
    await own.dispose()


def train_twice(engine: Engine, key: str) -> Any:
    """Train a run on two GPUs: an attempt of four hours over the end of a month that is lost, and one of an hour."""
    worker = add_worker(engine, devices=2, kind="cuda", names=[H100, H100])
    run = add_run(engine, created_by=key, devices_needed=2)
    times = text("UPDATE run_attempts SET started_at = :start, ended_at = :end WHERE run_id = :run AND attempt = :at")
    claim(engine, worker)
    with engine.begin() as connection:
        timings = {"run_id": run.id, "similarity_key": "x", "timings": {"tokens": 1000.0}}
        connection.execute(insert(AttemptTimings).values(attempt=1, measured_at=text("now()"), **timings))
        connection.execute(machine.retry(run.id, 1, "worker lost", 0.0)).one()
    row = claim(engine, worker)
    with engine.begin() as connection:
        connection.execute(machine.complete(run.id, row.lease_epoch, None, "done")).one()
        for attempt in (
            {"at": 1, "start": "2026-01-31 22:00Z", "end": "2026-02-01 02:00Z"},
            {"at": 2, "start": "2026-02-10 00:00Z", "end": "2026-02-10 01:00Z"},
        ):
            connection.execute(times, {"run": run.id, **attempt})
    return run


def rows(usage: UsageRead) -> list[tuple[Any, ...]]:
    return [
        (row.group, row.name, row.device_hours, row.tokens, row.cost and row.cost.amount, row.unpriced_device_hours)
        for row in usage.data
    ]


@pytest.mark.parametrize("is_counted_first", [False, True])
async def test_attempts_count_once_in_the_months_of_their_time_also_those_of_deleted_runs(
    engine: Engine, settings: Settings, session: AsyncSession, is_counted_first: bool
) -> None:
    key = add_key(engine, 8)
    run = train_twice(engine, key)
    priced = settings.model_copy(update={"gpu_hour_prices": "H100=2", "gpu_hour_price": 9.0})
    whole = (10.0, 1000, 20.0, 0.0)
    expected: dict[UsageBy, list[tuple[Any, ...]]] = {
        "month": [("2026-01", None, 4.0, 500, 8.0, 0.0), ("2026-02", None, 6.0, 500, 12.0, 0.0)],
        "key": [(key, "laptop", *whole)],
        "experiment": [(run.experiment_id, "an experiment", *whole)],
        "model": [("none", None, *whole)],
        "method": [("sft", None, *whole)],
    }
    assert {by: rows(await read_usage(session, priced, by, *YEAR)) for by in expected} == expected
    if is_counted_first:
        count_usage(engine)
    await delete_runs(session, [run.id])
    assert {by: rows(await read_usage(session, priced, by, *YEAR)) for by in expected} == expected
    count_usage(engine)  # leaves those out that are just being deleted
    await session.commit()
    for _ in range(3):
        assert {by: rows(await read_usage(session, priced, by, *YEAR)) for by in expected} == expected
        count_usage(engine)
    half = await read_usage(session, priced, "method", date(2026, 2, 1), date(2026, 2, 10))
    assert rows(half) == [("sft", None, 4.0, 500, 8.0, 0.0)] and half.total.device_hours == 4.0


async def test_run_that_is_deleted_while_its_attempts_are_being_counted_counts_once(
    engine: Engine, settings: Settings, session: AsyncSession
) -> None:
    run = train_twice(engine, add_key(engine, 8))
    with engine.begin() as counting:
        assert counting.scalar(count_attempts(Attempt, 1)) == 1
        deletion = asyncio.create_task(delete_runs(session, [run.id]))
        await asyncio.to_thread(eventually, lambda: waiting_for_locks(engine) == 1, what="the deletion waits")
    await deletion
    await session.commit()
    count_usage(engine)
    assert (await read_usage(session, settings, "month", *YEAR)).total.device_hours == 10.0


async def test_impossible_numbers_of_tokens_do_not_end_the_count_of_usage(
    engine: Engine, settings: Settings, session: AsyncSession
) -> None:
    key = add_key(engine, 8)
    for _ in range(2):
        train_twice(engine, key)
    with engine.begin() as connection:
        connection.execute(text("""UPDATE run_timings SET timings = '{"tokens": 1.7e308}'"""))
    for _ in range(2):
        ((group, _, device_hours, tokens, *_),) = rows(await read_usage(session, settings, "key", *YEAR))
        assert (group, device_hours, tokens) == (key, 20.0, 2 * 10**18)
        count_usage(engine)


async def test_attempt_that_has_not_ended_counts_until_now_and_what_has_no_price_has_no_cost(
    engine: Engine, settings: Settings, session: AsyncSession
) -> None:
    add_run(engine)
    claim(engine, add_worker(engine))
    with engine.begin() as connection:
        connection.execute(text("UPDATE run_attempts SET started_at = '2026-03-01 00:00Z'"))
    priced = settings.model_copy(update={"gpu_hour_price": 9.0})
    usage = await read_usage(session, priced, "key", date(2026, 3, 1), date(2026, 3, 3))
    assert rows(usage) == [(None, None, 48.0, 0, None, 48.0)]


@pytest.mark.parametrize("by", get_args(UsageBy))
async def test_days_are_selected_by_what_they_are_grouped_by_before_they_are_added_up(
    session: AsyncSession, by: UsageBy
) -> None:
    connection = await session.connection()
    query = usage_query(by, *YEAR).compile(dialect=connection.dialect)
    plan = (await connection.exec_driver_sql(f"EXPLAIN {query}", query.params)).scalars().all()
    assert any("dimension = " in line for line in plan), plan
    assert not any("Filter: (usage." in line for line in plan), "all usage is read, and more rows are expected than are"


def test_usage_is_shown_by_the_api_and_the_command(shared_api: ApiServer, anneal: Anneal) -> None:
    shown = shared_api.client.get("/v1/usage", params={"by": "key", "from": "2026-01-01", "to": "2026-02-01"}).json()
    nothing = {"device_hours": 0.0, "tokens": 0, "cost": None, "unpriced_device_hours": 0.0}
    period = {"by": "key", "from": "2026-01-01", "to": "2026-02-01"}
    assert shown == {**period, "data": [], "has_more": False, "total": nothing}
    command = ("usage", "--by", "key", "--from", "2026-01-01", "--to", "2026-02-01")
    assert json_of(anneal(*command, "--json")) == shown
    assert anneal(*command).stdout.splitlines()[-1].split() == ["total", "-", "0.00", "0", "-"]
    default = shared_api.client.get("/v1/usage").json()
    assert default["from"][-2:] == "01" and default["by"] == "month"
    same_day = {"from": "2026-02-01", "to": "2026-02-01"}
    for wrong in ({"by": "user"}, same_day, {"to": "yesterday"}, {"from": "0001-01-01"}):
        assert shared_api.client.get("/v1/usage", params=wrong).status_code == 422
