"""PostgreSQL connections: async for the API, sync for workers, with one driver for both."""

import select
from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import _queries
from sqlalchemy import ColumnElement, Engine, create_engine, event, func, literal
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg, PGDialectAsync_psycopg
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, InvalidatePoolError, OperationalError, TimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool
from sqlalchemy.util import LRUCache


class _SharedCacheDialect:
    """Dialect whose instances, one for each engine, are equal, so that a statement is compiled once for all engines.

    A process has several engines, and the compilation of a large statement takes many times as long as its execution.
    """

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


class AsyncDialect(_SharedCacheDialect, PGDialectAsync_psycopg):
    """SQLAlchemy's psycopg dialect of an async engine."""

    supports_statement_cache = True  # SQLAlchemy takes it of no base class


class Dialect(_SharedCacheDialect, PGDialect_psycopg):
    """SQLAlchemy's psycopg dialect."""

    supports_statement_cache = True

    @classmethod
    def get_async_dialect_cls(cls, url: URL) -> type[AsyncDialect]:
        return AsyncDialect


# psycopg 3.3 parses the parameters of longer statements in each execution, which takes up to half a millisecond.
_queries.MAX_CACHED_STATEMENT_LENGTH = 16_384
registry.register("postgresql.anneal", __name__, Dialect.__name__)

_COMPILED: LRUCache[Any, Any] = LRUCache(1000)
"""Compiled statements of all engines, by SQLAlchemy's keys, which begin with the dialect."""
_ENGINE_OPTIONS: dict[str, Any] = {
    "execution_options": {"compiled_cache": _COMPILED},
    "hide_parameters": True,  # keeps user data out of the log
    "use_native_hstore": False,  # without this, each engine looks for the extension in its first connection
}


def driver_url(url: str) -> URL:
    """Return the URL with the name of our psycopg dialect, for any common spelling of the scheme."""
    return make_url(url).set(drivername="postgresql+anneal")


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
        **_ENGINE_OPTIONS,
        **options,
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=5,
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
        pool: dict[str, Any] = {"poolclass": NullPool}
    else:
        pool = {"pool_size": pool_size, "max_overflow": pool_size * 2, "pool_timeout": 5}
    engine = create_engine(driver_url(url), **_ENGINE_OPTIONS, **pool, connect_args=arguments)
    if pool_size > 0:
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
    """Return True if PostgreSQL ended a transaction because of others, as one of two that waited for each other.

    The same one may be repeated.
    """
    original = getattr(error, "orig", None) or error
    errors = psycopg.errors
    return isinstance(original, errors.DeadlockDetected | errors.SerializationFailure | errors.LockNotAvailable)


def is_timeout(error: BaseException) -> bool:
    """Return True if PostgreSQL ended a statement that took longer than its limit."""
    return isinstance(getattr(error, "orig", None) or error, psycopg.errors.QueryCanceled)


def join_column(values: Iterable[object]) -> str:
    """Join the values of a column into one text, for `string_to_table(…, chr(31))`.

    Serializing an array takes many times as long. Neither JSON nor a number contains this character unescaped.
    """
    return "\x1f".join(map(str, values))


def session_maker(engine: AsyncEngine) -> async_sessionmaker[AsyncSession]:
    """Create a session factory whose objects stay readable after the commit."""
    return async_sessionmaker(engine, expire_on_commit=False)


def interval_seconds(value: float) -> ColumnElement[Any]:
    """Build an interval; all leases and delays use the database's clock."""
    return func.make_interval(0, 0, 0, 0, 0, 0, literal(value))
