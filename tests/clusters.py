"""A PostgreSQL cluster with migrated databases, created once for all processes of a test session, then copied.

A new cluster and its migrations take two seconds of processor time, a copy a twentieth of that. `anneal up`, the chaos
suite and `tests/app/standalone` still create theirs.
"""

import contextlib
import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
from sqlalchemy.engine import make_url

from app.config import Settings
from app.infra.private_files import make_private_folder
from app.standalone.servers import EmbeddedServers
from app.tables import migrate

TEMPLATE = "anneal_template"
"""Migrated database to which nothing connects, from which others are created."""

_shared: Path | None = None


@contextlib.contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Keep the cluster that `copy_to` copies in `folder`, which the processes of a session share."""
    global _shared
    _shared = folder
    try:
        yield
    finally:
        _shared = None


def copy_to(home: Path) -> None:
    """Give a home without a cluster the session's one and its passwords; do nothing outside a session."""
    if _shared is None or (home / "postgres").exists():
        return
    make_private_folder(_shared)
    original = _shared / "home"
    with (_shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not original.exists():
            _create(_shared / "new")
            (_shared / "new").rename(original)
    make_private_folder(home)
    subprocess.run(["cp", "-a", original / "postgres", original / "secrets.json", home], check=True)


def _create(home: Path) -> None:
    """Create a cluster whose databases `anneal` and `TEMPLATE` are migrated."""
    shutil.rmtree(home, ignore_errors=True)
    servers = EmbeddedServers(home, valkey=False, durable=False)
    servers.start()
    try:
        url = servers.database_url or ""
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {TEMPLATE}")
        for database in (url, make_url(url).set(database=TEMPLATE).render_as_string(hide_password=False)):
            migrate.upgrade_schema(Settings(home=home, database_url=database))
    finally:
        servers.stop()
