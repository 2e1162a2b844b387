"""The database of this home: your own server, or the embedded one, which is started if no `anneal up` runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anneal.local_service import is_held, read_json
from app.config import Settings
from app.infra.errors import SetupError
from app.infra.home_lock import HomeLock
from app.infra.server_urls import check_urls
from app.standalone.servers import EmbeddedServers

Say = Callable[[str], None]


@contextmanager
def open_database(settings: Settings, say: Say) -> Iterator[str]:
    """Provide the URL of the database, also while `anneal up` runs.

    Raises:
        SetupError: This home has no database.
    """
    check_urls(settings)
    if settings.database_url is not None:
        yield settings.database_url
    elif is_held(settings.home):
        url = (read_json(settings.home / "embedded.json") or {}).get("database_url")
        if not url:
            raise SetupError(f"The `anneal up` of {settings.home} is still starting: try again when it is ready.")
        yield str(url)
    elif not (settings.home / "postgres" / "data").exists():
        raise SetupError(
            f"{settings.home} has no database: set ANNEAL_HOME to the folder of `anneal up`, or ANNEAL_DATABASE_URL."
        )
    else:
        with _start_embedded(settings, say) as url:
            yield url


@contextmanager
def reserve_database(settings: Settings, say: Say) -> Iterator[str]:
    """Provide the URL of the database while no `anneal up` can use this home; create an embedded one if needed.

    Raises:
        SetupError: `anneal up` runs on this home.
    """
    check_urls(settings)
    if is_held(settings.home):
        raise SetupError(f"`anneal up` runs on {settings.home}: stop it with `anneal down`, and restore then.")
    if settings.database_url is None:
        with _start_embedded(settings, say) as url:
            yield url
    else:
        with HomeLock(settings.home):
            yield settings.database_url


@contextmanager
def _start_embedded(settings: Settings, say: Say) -> Iterator[str]:
    with HomeLock(settings.home):
        servers = EmbeddedServers(settings.home, valkey=False)
        say(f"Starting PostgreSQL in {settings.home} …")
        servers.start()
        try:
            yield servers.database_url or ""
        finally:
            servers.stop()
