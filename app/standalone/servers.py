"""Embedded PostgreSQL and Valkey below ANNEAL_HOME, used when no external servers are configured."""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from app.infra.errors import PortInUse, SetupError
from app.infra.private_files import make_private_folder, read_json, write_private_json
from app.standalone.postgres import Postgres
from app.standalone.valkey import Valkey

log = logging.getLogger(__name__)


_MAX_PORTS = 3
"""Number of ports to try when another program takes the chosen one first."""


class EmbeddedServers:
    """Embedded servers of one home. The caller must hold the home's lock and call from its main thread.

    `durable=False` trades safety against power loss for speed (tests); a SIGKILL loses no data in either case.
    """

    def __init__(
        self,
        home: Path,
        *,
        postgres: bool = True,
        valkey: bool = True,
        durable: bool = True,
        redis_databases: int = 16,
    ) -> None:
        self.home = make_private_folder(home)
        logs = make_private_folder(home / "logs")
        passwords = _load_passwords(home)
        ports = read_json(home / "embedded.json") or {}
        self.postgres = (
            Postgres(
                home / "postgres",
                logs / "postgres.log",
                admin_password=passwords["postgres_admin"],
                password=passwords["postgres"],
                durable=durable,
            )
            if postgres
            else None
        )
        self.valkey = (
            Valkey(home / "valkey", logs / "valkey.log", password=passwords["valkey"], databases=redis_databases)
            if valkey
            else None
        )
        for server in self.servers:
            server.port = ports.get(f"{server.name}_port")

    @property
    def servers(self) -> list[Postgres | Valkey]:
        """Embedded servers to run, in start order."""
        return [server for server in (self.postgres, self.valkey) if server is not None]

    @property
    def database_url(self) -> str | None:
        """URL of the embedded database; None with an external one."""
        return self.postgres.url if self.postgres else None

    @property
    def redis_url(self) -> str | None:
        """URL of the embedded Valkey; None with an external one."""
        return self.valkey.url if self.valkey else None

    def start(self, check: Callable[[], None] = lambda: None) -> None:
        """Start both servers at once, wait until both are ready, and publish their URLs for commands on this home.

        `check` is called while waiting; if it raises, both servers are stopped.
        """
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:
                _wait_ready(server, check)
        except BaseException:
            self.stop()
            raise
        self.publish()

    def publish(self) -> None:
        """Write `embedded.json`, which `resolve_urls` reads."""
        found: dict[str, object] = {}
        if self.postgres:
            found |= {"database_url": self.postgres.url, "postgres_port": self.postgres.port}
        if self.valkey:
            found |= {"redis_url": self.valkey.url, "valkey_port": self.valkey.port}
        write_private_json(self.home / "embedded.json", found)

    def stop(self) -> None:
        """Stop both servers, the database last."""
        for server in reversed(self.servers):
            server.stop()


def _wait_ready(server: Postgres | Valkey, check: Callable[[], None]) -> None:
    """Wait for a started server; restart it on another port if another program took its port."""
    for _ in range(_MAX_PORTS - 1):
        try:
            return server.wait_ready(check)
        except PortInUse as error:
            log.warning("%s; trying another port", str(error).partition(";")[0])
        server.stop()
        server.start()
    server.wait_ready(check)


def _load_passwords(home: Path) -> dict[str, str]:
    """Return the servers' passwords, generated once per home."""
    path = home / "secrets.json"
    found = read_json(path)
    names = ("postgres_admin", "postgres", "valkey")
    if found is not None and all(isinstance(found.get(name), str) for name in names):
        return {name: str(found[name]) for name in names}
    if (home / "postgres" / "data").exists():
        raise SetupError(
            f"{path} with the passwords of the database in {home / 'postgres'} is missing or unreadable: restore it, "
            "or set ANNEAL_HOME to a new folder."
        )
    made = {name: secrets.token_urlsafe(24) for name in names}
    write_private_json(path, dict(made))
    return made
