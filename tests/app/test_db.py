"""When the database counts as away."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, ProgrammingError

from app.config import Settings
from app.db import async_engine, is_away, sync_engine

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
