"""Bringing the database to the schema of this version."""

from pathlib import Path

import alembic.command
import alembic.config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

import migrations
from app.clock import utc_now
from app.config import Settings
from app.db import sync_engine
from app.events.partitions import ensure_partitions

_LOCK = 0x616E6E65  # "anne": one migration at a time, whichever replica starts first


def alembic_config() -> alembic.config.Config:
    """Alembic's configuration without an ini file."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    return config


def head() -> str:
    """The revision that this version of the code works with."""
    return ScriptDirectory.from_config(alembic_config()).get_current_head() or ""


def current(connection: Connection) -> str:
    """The revision that the database has; empty before the first migration."""
    return MigrationContext.configure(connection).get_current_revision() or ""


def upgrade(settings: Settings) -> tuple[str, str]:
    """Migrate to the newest revision in one transaction; answers the revisions before and after.

    Safe to call from any number of replicas at once: one migrates, the others wait and find it done.
    """
    if settings.database_url is None:
        raise ValueError("no database URL: start `anneal up` first or set ANNEAL_DATABASE_URL")
    engine = sync_engine(settings.database_url, pool_size=0, name="anneal-migrate")
    try:
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            before = current(connection)
            config = alembic_config()
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")
            ensure_partitions(connection, utc_now())
            return before, head()
    finally:
        engine.dispose()
