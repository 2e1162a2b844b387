"""Bringing the database to the schema of this version, while replicas of the version before serve."""

import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

import migrations
from app.clock import utc_now
from app.config import Settings
from app.db import sync_engine
from app.events.partitions import ensure_partitions
from app.home import HomeError

VERSIONS = (Path(migrations.__file__).parent / "versions",)
"""Where the migrations lie."""
_LOCK = 0x616E6E65  # "anne": one migration at a time, whichever replica starts first
LOCK_SECONDS = 1.0
"""A migration waits no longer for a table: while it does, every append to that table queues up behind it."""
_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 10.0
PATIENCE_SECONDS = 600.0
"""After so long of trying, something holds the table for good, and an operator has to look."""
_TURN_SECONDS = 0.1

Say = Callable[[str], None]


def _silently(_: str) -> None:
    """Who is not asked about progress says nothing."""


_IS_MIGRATED = text("SELECT to_regclass('alembic_version') IS NOT NULL")
_CURRENT = text("SELECT version_num FROM alembic_version")


# These two do without Alembic, which would be a tenth of the start of every API and worker.
def head() -> str:
    """The revision that this version of the code works with: the highest number of a file."""
    return max(file.name[:4] for folder in VERSIONS for file in folder.glob("[0-9]*.py"))


def current(connection: Connection) -> str:
    """The revision that the database has; empty before the first migration."""
    return (connection.scalar(_CURRENT) or "") if connection.scalar(_IS_MIGRATED) else ""


def too_old(revision: str) -> str | None:
    """What to do about a database that this code cannot work with; None when it can.

    A newer database is fine: a migration leaves what the version before it needs (`migrations` says how). Revisions
    are numbers of four digits, so the order of their names is their order.
    """
    if revision >= head():
        return None
    return f"The database is at revision {revision or 'none'}, this version needs {head()}: run `anneal migrate`."


def upgrade(settings: Settings, say: Say = _silently) -> tuple[str, str]:
    """Migrate to the newest revision, each migration in its own transaction; answers the revisions before and after.

    Safe to call from any number of replicas at once: one migrates, the others wait and find it done. A database that
    a later version has migrated stays as it is. A table that is in use is tried again and again.

    Raises:
        HomeError: a table was in use all the time.
    """
    if settings.database_url is None:
        raise ValueError("no database URL: start `anneal up` first or set ANNEAL_DATABASE_URL")
    engine = sync_engine(settings.database_url, pool_size=0, name="anneal-migrate", statement_seconds=0)
    try:
        # Held by the session, not in a transaction: an index that is built beside the appends waits for all of those.
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as turn:
            while not turn.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _LOCK}):
                time.sleep(_TURN_SECONDS)
            before = current(turn)
            if before <= head():
                _patiently(engine, _migrate, say)
            _patiently(engine, _make_partitions, say)
            return before, current(turn)
    finally:
        engine.dispose()


def _migrate(connection: Connection) -> None:
    import alembic.command
    import alembic.config

    config = alembic.config.Config()
    places = "\n".join(str(folder) for folder in VERSIONS)
    for name, value in (
        ("script_location", str(Path(migrations.__file__).parent)),
        ("path_separator", "newline"),
        ("version_locations", places),
    ):
        config.set_main_option(name, value.replace("%", "%%"))
    config.attributes["connection"] = connection
    alembic.command.upgrade(config, "head")


def _make_partitions(connection: Connection) -> None:
    with connection.begin():
        ensure_partitions(connection, utc_now())


def _patiently(engine: Engine, work: Callable[[Connection], None], say: Say) -> None:
    """Do it, waiting for locks only shortly, until nobody is in the way."""
    began, pause = time.monotonic(), _PAUSE_SECONDS
    while True:
        try:
            with engine.connect() as connection:
                connection.execute(text(f"SET lock_timeout = '{LOCK_SECONDS:g}s'"))
                connection.commit()
                return work(connection)
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) not in ("55P03", "40P01"):  # lock_not_available, deadlock_detected
                raise
        if time.monotonic() - began > PATIENCE_SECONDS:
            raise HomeError(
                f"A table that has to change has been in use for {PATIENCE_SECONDS:.0f} s by {_oldest(engine)}; "
                "end that and run `anneal migrate` again. Nothing is half done."
            )
        say(f"A table that has to change is in use by {_oldest(engine)}; trying again in {pause:g} s.")
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)


def _oldest(engine: Engine) -> str:
    """Who has had a transaction open for the longest time: who holds the lock, most likely."""
    query = text(
        "SELECT coalesce(nullif(application_name, ''), 'a client') || ', process ' || pid || ', in a transaction for '"
        " || round(extract(epoch FROM clock_timestamp() - xact_start)) || ' s' FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
        " ORDER BY xact_start LIMIT 1"
    )
    with engine.connect() as connection:
        found: str | None = connection.scalar(query)
    return found or "a transaction that has just ended"
