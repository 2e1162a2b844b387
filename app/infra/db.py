"""PostgreSQL connections: async for the API, sync for workers, with one driver for both."""

import select
from collections.abc import Iterable
from typing import Any

import psycopg
from sqlalchemy import ColumnElement, Engine, create_engine, event, func, literal
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, InvalidatePoolError, OperationalError, TimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool


def driver_url(url: str) -> URL:
    """Return the URL with SQLAlchemy's psycopg driver name, for any common spelling of the scheme."""
    return make_url(url).set(drivername="postgresql+psycopg")


def _connect_arguments(name: str, idle_seconds: int, statement_seconds: float = 30.0) -> dict[str, Any]:
    return {
        "application_name": name,
        "connect_timeout": 5,
        # Detect a vanished peer within seconds instead of the kernel's 15 minutes.
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 15000,
        "options": f"-c timezone=UTC -c statement_timeout={int(statement_seconds * 1000)} "
        f"-c idle_in_transaction_session_timeout={idle_seconds * 1000}",
    }


def async_engine(url: str, pool_size: int = 10, *, reads_only: bool = False) -> AsyncEngine:
    """Create an engine of the API process; with `reads_only`, its statements are not part of a transaction."""
    # To switch a connection of another engine to autocommit and back takes as long as a short query.
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "pool_reset_on_return": None} if reads_only else {}
    engine = create_async_engine(
        driver_url(url),
        **options,
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=5,
        hide_parameters=True,  # keeps user data out of the log
        connect_args=_connect_arguments("anneal-api", idle_seconds=60),
    )
    event.listen(engine.sync_engine, "handle_error", _disconnect_read_only)
    event.listen(engine.sync_engine, "checkout", _discard_closed)
    return engine


def sync_engine(url: str, pool_size: int = 4, name: str = "anneal-worker", statement_seconds: float = 30.0) -> Engine:
    """Create the engine of a worker or a command; `pool_size=0` opens a connection for each use."""
    # A worker that is disconnected in the middle of a transaction leaves its run locked, also for stops and for the
    # reaper, until PostgreSQL aborts the transaction. This must happen well before waiters for the lock time out.
    arguments = _connect_arguments(name, idle_seconds=15, statement_seconds=statement_seconds)
    if pool_size == 0:
        engine = create_engine(driver_url(url), poolclass=NullPool, hide_parameters=True, connect_args=arguments)
    else:
        engine = create_engine(
            driver_url(url),
            pool_size=pool_size,
            max_overflow=pool_size * 2,
            pool_timeout=5,
            hide_parameters=True,  # keeps user data out of the log
            connect_args=arguments,
        )
        event.listen(engine, "checkout", _discard_closed)
    event.listen(engine, "handle_error", _disconnect_read_only)
    return engine


def _disconnect_read_only(context: ExceptionContext) -> None:
    """Treat a read-only server as disconnected: it is or becomes a standby, so all its connections are invalidated."""
    if isinstance(context.original_exception, psycopg.errors.ReadOnlySqlTransaction):
        context.is_disconnect = True


def _discard_closed(_: Any, record: ConnectionPoolEntry, __: Any) -> None:
    """Discard a pooled connection that the server has closed: its socket is readable; the pool then opens a new one.

    SQLAlchemy's `pool_pre_ping` costs one more round trip for every transaction. Neither method detects a server
    that vanished without closing its connections: the next statement (or the ping) fails after its timeout.
    """
    connection = record.driver_connection
    if connection is None or connection.closed:
        raise InvalidatePoolError
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if poll.poll(0):
        raise InvalidatePoolError


def is_away(error: BaseException) -> bool:
    """Return True if the database was unreachable or failed, so that a retry may help; False means a bug."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(
        error, OperationalError | InterfaceError | TimeoutError | psycopg.OperationalError | psycopg.InterfaceError
    )


def is_conflict(error: BaseException) -> bool:
    """Return True if PostgreSQL ended a transaction of two that waited for each other; the same one may be repeated."""
    original = getattr(error, "orig", None) or error
    return isinstance(original, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure)


def column(values: Iterable[object]) -> str:
    """Join the values of a column into one text, for `string_to_table(…, chr(31))`.

    Serializing an array takes many times as long. Neither JSON nor a number contains this character unescaped.
    """
    return "\x1f".join(map(str, values))


def session_maker(engine: AsyncEngine) -> async_sessionmaker[AsyncSession]:
    """Create a session factory whose objects stay readable after the commit."""
    return async_sessionmaker(engine, expire_on_commit=False)


def seconds(value: float) -> ColumnElement[Any]:
    """Build an interval; all leases and delays use the database's clock."""
    return func.make_interval(0, 0, 0, 0, 0, 0, literal(value))
