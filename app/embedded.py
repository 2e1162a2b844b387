"""Embedded PostgreSQL and Valkey below ANNEAL_HOME, used when no external servers are configured."""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import redis
from sqlalchemy.exc import ArgumentError

from app.config import Settings
from app.db import driver_url
from app.embedded_postgres import Postgres
from app.embedded_valkey import Valkey
from app.home import HomeError, PortTaken, make_private_folder, read_json, write_private_json

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
        except PortTaken as error:
            log.warning("%s; trying another port", str(error).partition(";")[0])
        server.stop()
        server.start()
    server.wait_ready(check)


def resolve_urls(settings: Settings) -> Settings:
    """Return the settings with both URLs set, using the embedded servers of this home where none are configured.

    Raises `HomeError` if a URL is neither configured nor published by embedded servers.
    """
    check_urls(settings)
    if settings.database_url and settings.redis_url:
        return settings
    found = read_json(settings.home / "embedded.json") or {}
    database_url = settings.database_url or found.get("database_url")
    redis_url = settings.redis_url or found.get("redis_url")
    if not database_url or not redis_url:
        missing = "ANNEAL_DATABASE_URL" if not database_url else "ANNEAL_REDIS_URL"
        raise HomeError(f"No server is running for {settings.home}: start `anneal up` first or set {missing}.")
    return settings.model_copy(update={"database_url": database_url, "redis_url": redis_url})


def check_urls(settings: Settings) -> None:
    """Check the configured URLs before anything is started with them; raises `HomeError` for an invalid one."""
    try:
        if settings.database_url:
            driver_url(settings.database_url)
    except (ArgumentError, ValueError):
        # The value may contain a password, so the message does not repeat it.
        raise HomeError(
            "ANNEAL_DATABASE_URL is not a valid database URL: use postgresql://user:password@host/name."
        ) from None
    try:
        if settings.redis_url:
            redis.Redis.from_url(settings.redis_url).close()
    except ValueError as error:
        raise HomeError(f"ANNEAL_REDIS_URL is not a valid Redis URL: {error}") from None


def _load_passwords(home: Path) -> dict[str, str]:
    """Return the servers' passwords, generated once per home."""
    path = home / "secrets.json"
    found = read_json(path)
    names = ("postgres_admin", "postgres", "valkey")
    if found is not None and all(isinstance(found.get(name), str) for name in names):
        return {name: str(found[name]) for name in names}
    if (home / "postgres" / "data").exists():
        raise HomeError(
            f"{path} with the passwords of the database in {home / 'postgres'} is missing or unreadable: restore it, "
            "or set ANNEAL_HOME to a new folder."
        )
    made = {name: secrets.token_urlsafe(24) for name in names}
    write_private_json(path, dict(made))
    return made
