"""Embedded PostgreSQL and Valkey below ANNEAL_HOME, used when no external servers are configured."""

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from anneal.local_service import read_json
from app.infra.errors import SetupError
from app.infra.private_files import make_private_folder, try_write_private_json, write_private_json
from app.standalone.postgres import SOCKET, Postgres
from app.standalone.valkey import Valkey

_LONGEST_SOCKET = 107
"""Bytes that the kernel takes for the path of a socket."""


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
        trainer_user: str | None = None,
    ) -> None:
        self.home = make_private_folder(home)
        logs = make_private_folder(home / "logs")
        passwords = _load_passwords(home)
        sockets = _socket_folder(home)
        self.postgres = (
            Postgres(
                home / "postgres",
                sockets,
                logs / "postgres.log",
                admin_password=passwords["postgres_admin"],
                password=passwords["postgres"],
                durable=durable,
                trainer_user=trainer_user,
            )
            if postgres
            else None
        )
        self.valkey = (
            Valkey(
                home / "valkey", sockets, logs / "valkey.log", password=passwords["valkey"], databases=redis_databases
            )
            if valkey
            else None
        )

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
                server.wait_ready(check)
        except BaseException:
            self.stop()
            raise
        self.publish_urls()

    def publish_urls(self) -> bool:
        """Write the URLs of the servers unless the file has them; False if it cannot be written now."""
        urls = {"database_url": self.database_url, "redis_url": self.redis_url}
        path, known = self.home / "embedded.json", {name: url for name, url in urls.items() if url}
        return read_json(path) == known or try_write_private_json(path, known)

    def stop(self) -> None:
        """Stop both servers, the database last."""
        for server in reversed(self.servers):
            server.stop()


def _socket_folder(home: Path) -> Path:
    """Return the folder of the servers' sockets, which no other user may enter."""
    folder = make_private_folder(home / "sockets")
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise SetupError(f"{folder} is not a folder of this user: remove it, or set ANNEAL_HOME to another folder.")
    folder.chmod(0o700)
    length = len(os.fsencode(folder / SOCKET))
    if length > _LONGEST_SOCKET or "," in str(folder):
        raise SetupError(
            f"{folder} cannot hold the socket of a server, whose path has {length} bytes: set ANNEAL_HOME to a folder "
            f"whose path has at most {_LONGEST_SOCKET - length + len(os.fsencode(home))} bytes and no comma, or "
            "ANNEAL_DATABASE_URL and ANNEAL_REDIS_URL to your own servers."
        )
    return folder


def _load_passwords(home: Path) -> dict[str, str]:
    """Return the servers' passwords, generated once per home."""
    path = home / "secrets.json"
    stored = read_json(path)
    names = ("postgres_admin", "postgres", "valkey")
    if stored is not None and all(isinstance(stored.get(name), str) for name in names):
        return {name: str(stored[name]) for name in names}
    if (home / "postgres" / "data").exists():
        raise SetupError(
            f"{path} with the passwords of the database in {home / 'postgres'} is missing or unreadable: restore it, "
            "or set ANNEAL_HOME to a new folder."
        )
    created = {name: secrets.token_urlsafe(24) for name in names}
    write_private_json(path, dict(created))
    return created
