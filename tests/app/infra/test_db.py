"""When the database counts as away."""

import asyncio
import secrets
from collections.abc import Iterator

import pytest
from psycopg import _queries
from sqlalchemy import Engine, literal, select, text
from sqlalchemy.engine.interfaces import CacheStats
from sqlalchemy.exc import DBAPIError, ProgrammingError

from app.config import Settings
from app.infra.db import async_engine, is_away, sync_engine

_WRITE = text("CREATE TABLE written (x int)")
_PID = text("SELECT pg_backend_pid()")


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    engine = sync_engine(settings.database_url or "", pool_size=1)
    yield engine
    engine.dispose()


def test_a_server_that_takes_no_writes_is_away_and_its_connections_are_given_up(engine: Engine) -> None:
    """As during a failover: the old primary still answers questions, so pings alone would keep its connections."""
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        before = connection.scalar(_PID)
        connection.execute(text("SET default_transaction_read_only = on"))
        with pytest.raises(DBAPIError) as refused:
            connection.execute(_WRITE)
    assert is_away(refused.value)
    with engine.begin() as connection:
        assert connection.scalar(_PID) != before
        connection.execute(_WRITE)


async def test_the_same_holds_for_the_api(settings: Settings) -> None:
    engine = async_engine(settings.database_url or "", pool_size=1)
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        before = await connection.scalar(_PID)
        await connection.execute(text("SET default_transaction_read_only = on"))
        with pytest.raises(DBAPIError) as refused:
            await connection.execute(_WRITE)
    assert is_away(refused.value)
    async with engine.connect() as connection:
        assert await connection.scalar(_PID) != before
    await engine.dispose()


def test_a_mistake_of_ours_is_no_absence(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(ProgrammingError) as refused:
        connection.execute(text("SELECT nothing FROM nowhere"))
    assert not is_away(refused.value)


def _end_others(settings: Settings) -> None:
    """Close every other connection to this database from the server's side, and wait until that has happened."""
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with sync_engine(settings.database_url or "", pool_size=0).connect() as connection:
        connection.execute(text(f"SELECT pg_terminate_backend(pid, 10000) {others}"))


def test_connections_that_the_server_has_closed_are_replaced_before_they_are_used(settings: Settings) -> None:
    engine = sync_engine(settings.database_url or "", pool_size=3)
    held = [engine.connect() for _ in range(3)]
    before = {connection.scalar(_PID) for connection in held}
    for connection in held:
        connection.close()
    _end_others(settings)
    for _ in range(4):
        with engine.begin() as connection:
            assert connection.scalar(_PID) not in before
    engine.dispose()


async def test_api_connections_ended_by_the_server_are_replaced(settings: Settings) -> None:
    engine = async_engine(settings.database_url or "", pool_size=2)
    async with engine.connect() as first, engine.connect() as second:
        before = {await first.scalar(_PID), await second.scalar(_PID)}
    await asyncio.to_thread(_end_others, settings)
    for _ in range(3):
        async with engine.connect() as connection:
            assert await connection.scalar(_PID) not in before
    await engine.dispose()


def test_a_statement_is_compiled_once_for_all_engines_of_a_process(settings: Settings) -> None:
    statement = select(literal(1).label(f"column_{secrets.token_hex(8)}"))
    hits = []
    for pool_size in (1, 1, 0):
        engine = sync_engine(settings.database_url or "", pool_size=pool_size)
        with engine.connect() as connection:
            hits.append(connection.execute(statement).context.cache_hit)
        engine.dispose()
    assert hits == [CacheStats.CACHE_MISS, CacheStats.CACHE_HIT, CacheStats.CACHE_HIT]


async def test_async_engines_too_but_not_with_the_statements_of_the_others(settings: Settings) -> None:
    column = f"column_{secrets.token_hex(8)}"
    hits = []
    for statement in (select(literal(1).label(column)), select(literal(2).label(column))):
        engine = async_engine(settings.database_url or "", pool_size=1, reads_only=bool(hits))
        async with engine.connect() as connection:
            hits.append((await connection.execute(statement)).context.cache_hit)
        await engine.dispose()
    engine = sync_engine(settings.database_url or "")
    with engine.connect() as connection:
        hits.append(connection.execute(select(literal(3).label(column))).context.cache_hit)
    engine.dispose()
    assert hits == [CacheStats.CACHE_MISS, CacheStats.CACHE_HIT, CacheStats.CACHE_MISS]


def test_parameters_of_a_long_statement_are_parsed_once(engine: Engine) -> None:
    statement = text(f"SELECT :value, {' + '.join(['1'] * 2000)}")
    with engine.connect() as connection:
        connection.execute(statement, {"value": "first"})
        hits = _queries._query2pg.cache_info().hits
        connection.execute(statement, {"value": "second"})
    assert _queries._query2pg.cache_info().hits > hits
