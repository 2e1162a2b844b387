"""Service of the demo: `anneal up` in a separate home folder."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from app.cli.demo.errors import DemoError
from app.config import Settings
from app.infra import home_lock
from app.infra.private_files import make_private_folder, read_json
from app.infra.process.children import last_lines, start_child, stop_child

_SECONDS_TO_START = 90.0
_SECONDS_TO_END = 60.0
_TICK_SECONDS = 0.1


@dataclass(frozen=True)
class Connection:
    """URL, API key and process ids (by name) of the service."""

    url: str
    key: str
    pids: dict[str, int]


def demo_settings(settings: Settings) -> Settings:
    """Return settings of a service that shares no home, servers, storage, models or port with the user's own.

    A worker that uses another storage must not claim the demo's runs.
    """
    home = settings.home / "demo"
    return Settings(
        home=home, storage=home / "storage", models_root=home / "models", database_url=None, redis_url=None,
        host="127.0.0.1", port=0,
    )  # fmt: skip


class Service:
    """`anneal up` as a child process, or the service that already runs in this home."""

    def __init__(self, settings: Settings, keep: bool) -> None:
        self.settings = settings
        self.log = make_private_folder(settings.home / "logs") / "up.log"
        self._keep = keep
        self._child: subprocess.Popen[bytes] | None = None
        self._running = _running(settings)

    @property
    def is_ours(self) -> bool:
        """True if the service was started here and is therefore stopped here."""
        return self._running is None

    def start(self) -> None:
        """Start the service without waiting; call from the main thread."""
        if self._running is not None:
            return
        command = [sys.executable, "-P", "-m", "app.cli.main", "up"]
        environment = self.settings.child_environment() | {"PYTHONUNBUFFERED": "1"}
        if not self._keep:
            self._child = start_child(command, log=self.log, environment=environment, death_signal=signal.SIGTERM)
            return
        with self.log.open("ab") as output:  # it keeps running: no death signal, own session
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> Connection:
        """Wait until API and worker are ready.

        Raises:
            DemoError: the service ended or did not become ready in time.
        """
        deadline = time.monotonic() + _SECONDS_TO_START
        while self._running is None and time.monotonic() < deadline:
            if self._child is None or self._child.poll() is not None:
                said = last_lines(self.log, 1) or "no output"
                raise DemoError(f"The service ended during startup ({said}); see {self.log}.")
            connection = _connection(self.settings)
            if connection is not None and connection.pids.get("up") == self._child.pid and _is_ready(connection):
                return connection
            time.sleep(_TICK_SECONDS)
        if self._running is None:
            said = last_lines(self.log, 1)
            raise DemoError(f"The service was not ready after {_SECONDS_TO_START:.0f} s. Last log line: {said}")
        return self._running

    def stop(self) -> None:
        """Stop the service, unless it is kept running."""
        if self._child is not None and not self._keep:
            stop_child(self._child, _SECONDS_TO_END)


@contextmanager
def service(settings: Settings, keep: bool, ending: Callable[[], None]) -> Iterator[Service]:
    """Start a service and stop it when the block exits, also on errors; call `ending` just before."""
    one = Service(settings, keep)
    one.start()
    try:
        yield one
    finally:
        try:
            ending()
        finally:
            one.stop()


def _running(settings: Settings) -> Connection | None:
    connection = _connection(settings)
    if connection is None or not home_lock.is_held(settings.home):
        return None
    return connection if _is_ready(connection) else None


def _connection(settings: Settings) -> Connection | None:
    found = read_json(settings.connection_file) or {}
    url, key, pids = found.get("url"), found.get("api_key"), found.get("pids")
    return Connection(url, key, pids) if url and key and pids else None


def _is_ready(connection: Connection) -> bool:
    try:
        with httpx.Client(
            base_url=connection.url, headers={"Authorization": f"Bearer {connection.key}"}, timeout=5, trust_env=False
        ) as http:
            if http.get("/readyz").status_code != 200:
                return False
            answer = http.get("/v1/workers")
            workers: list[dict[str, Any]] = answer.json()["data"] if answer.status_code == 200 else []
    except (httpx.HTTPError, ValueError, KeyError):
        return False
    # A worker that was killed earlier counts as online for a while, so compare the process id.
    return any(it["state"] == "online" and it["pid"] == connection.pids.get("worker") for it in workers)
