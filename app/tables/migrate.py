"""Migration of the database to the schema of this version, while replicas of the previous version serve requests."""

import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

import migrations
from app.config import Settings
from app.infra.clock import utc_now
from app.infra.db import sync_engine
from app.infra.errors import SetupError
from app.tables.events import ensure_partitions

VERSIONS = (Path(migrations.__file__).parent / "versions",)
"""Folders of the migrations."""
_LOCK = 0x616E6E65  # "anne" in ASCII; allows one migration at a time across replicas
LOCK_SECONDS = 1.0
"""Lock timeout of a migration: while it waits for a table, every append to that table waits behind it."""
_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 10.0
PATIENCE_SECONDS = 600.0
"""Seconds of retries after which the migration fails, because an operator must find out what holds the table."""
_LOCK_POLL_SECONDS = 0.1
_FIRST_REVISION = "0100"
"""First migration of a released version; development versions before 0.1.0 had lower numbers."""

Say = Callable[[str], None]


def _ignore_message(_: str) -> None:
    """Discard a progress message."""


_IS_MIGRATED = text("SELECT to_regclass('alembic_version') IS NOT NULL")
_CURRENT = text("SELECT version_num FROM alembic_version")


# `needed_revision` and `current_revision` avoid importing Alembic, which would take a tenth of the startup of every API
# and worker.
def needed_revision() -> str:
    """Return the revision that this version of the code needs: the highest file number."""
    return max(file.name[:4] for folder in VERSIONS for file in folder.glob("[0-9]*.py"))


def current_revision(connection: Connection) -> str:
    """Return the revision of the database; empty before the first migration."""
    return (connection.scalar(_CURRENT) or "") if connection.scalar(_IS_MIGRATED) else ""


def schema_error(revision: str) -> str | None:
    """Return an error message if the database is too old for this code; None if it is compatible.

    A newer database is compatible: a migration keeps what the previous version needs (`migrations` says how).
    Revisions are four-digit numbers, so they sort by name.
    """
    if revision >= needed_revision():
        return None
    return (
        f"The database is at revision {revision or 'none'}, but this version needs {needed_revision()}: "
        "run `anneal migrate`."
    )


def upgrade_schema(settings: Settings, say: Say = _ignore_message) -> tuple[str, str]:
    """Migrate to the newest revision, one transaction per migration; returns the revisions before and after.

    Safe to call from several replicas at once: one migrates while the others wait. A database migrated by a later
    version stays unchanged. If a table is in use, the migration is retried for `PATIENCE_SECONDS`.

    Raises:
        SetupError: A table was in use during all retries, or the database is that of a development version.
    """
    if settings.database_url is None:
        raise ValueError("no database URL: start `anneal up` first or set ANNEAL_DATABASE_URL")
    engine = sync_engine(settings.database_url, pool_size=0, name="anneal-migrate", statement_seconds=0)
    try:
        # A session lock, held outside a transaction: `CREATE INDEX CONCURRENTLY` waits for all open transactions.
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as lock_connection:
            while not lock_connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _LOCK}):
                time.sleep(_LOCK_POLL_SECONDS)
            before = current_revision(lock_connection)
            if "" < before < _FIRST_REVISION:
                raise SetupError(
                    f"The database was created by a development version (revision {before}), which cannot be migrated: "
                    "use a new ANNEAL_HOME or an empty database."
                )
            if before <= needed_revision():
                _with_retries(engine, _run_migration, say)
            _with_retries(engine, _make_partitions, say)
            return before, current_revision(lock_connection)
    finally:
        engine.dispose()


def _run_migration(connection: Connection) -> None:
    import alembic.command
    import alembic.config

    config = alembic.config.Config()
    folders = "\n".join(str(folder) for folder in VERSIONS)
    for name, value in (
        ("script_location", str(Path(migrations.__file__).parent)),
        ("path_separator", "newline"),
        ("version_locations", folders),
    ):
        config.set_main_option(name, value.replace("%", "%%"))
    config.attributes["connection"] = connection
    alembic.command.upgrade(config, "head")


def _make_partitions(connection: Connection) -> None:
    with connection.begin():
        ensure_partitions(connection, utc_now())


def _with_retries(engine: Engine, work: Callable[[Connection], None], say: Say) -> None:
    """Run `work` with a short lock timeout and retry until it gets its locks."""
    began, pause = time.monotonic(), _RETRY_SECONDS
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
            raise SetupError(
                f"A table to migrate has been in use for {PATIENCE_SECONDS:.0f} s by {_oldest_transaction(engine)}; "
                "stop that process and run `anneal migrate` again. No migration is partially applied."
            )
        say(f"A table to migrate is in use by {_oldest_transaction(engine)}; trying again in {pause:g} s.")
        time.sleep(pause)
        pause = min(pause * 2, _MAX_RETRY_SECONDS)


def _oldest_transaction(engine: Engine) -> str:
    """Describe the client with the oldest open transaction, which most likely holds the lock."""
    query = text(
        "SELECT coalesce(nullif(application_name, ''), 'a client') || ', process ' || pid || ', in a transaction for '"
        " || round(extract(epoch FROM clock_timestamp() - xact_start)) || ' s' FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
        " ORDER BY xact_start LIMIT 1"
    )
    with engine.connect() as connection:
        oldest: str | None = connection.scalar(query)
    return oldest or "a transaction that has just ended"
