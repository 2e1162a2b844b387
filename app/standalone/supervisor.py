"""`anneal up`: runs all services on this machine and restarts them until it is stopped."""

import http.client
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol
from urllib.parse import urlsplit

from sqlalchemy import select as select_rows
from sqlalchemy.exc import SQLAlchemyError

from anneal.local_service import read_json
from app.api_keys.service import renew_admin_key_sync
from app.config import Settings
from app.infra.db import sync_engine
from app.infra.files.disk_space import DatabaseReserve
from app.infra.home_lock import HomeLock
from app.infra.private_files import make_private_folder, try_write_private_json
from app.infra.process.children import start_child, stop_child
from app.infra.server_urls import check_urls
from app.server import REQUEST_GRACE_SECONDS, base_url, open_listener
from app.standalone.child_log import ChildLog
from app.standalone.servers import EmbeddedServers
from app.tables import migrate
from app.tables.workers import Worker
from app.workers import status_files

_STABLE_SECONDS = 30.0  # a process that ran this long before it exited is restarted at once
_MAX_BACKOFF_SECONDS = 30.0
_NOT_READY_REPORT_SECONDS = 60.0  # after which a startup that is not ready yet is reported
_TICK_SECONDS = 0.2
_PUBLISH_AGAIN_SECONDS = 1.0
_API_GRACE_SECONDS = REQUEST_GRACE_SECONDS + 5.0
_WORKER_EXTRA_GRACE_SECONDS = 10.0
"""Seconds beyond the save grace of trainers: the worker then kills those that did not save, and reports it."""

_WARMING = "The training libraries are still loading: a run that starts now waits for them.\n"

Say = Callable[[str], None]


class Startable(Protocol):
    """Interface of supervised processes: the embedded servers, the API and the worker."""

    @property
    def name(self) -> str: ...

    @property
    def process(self) -> Popen[bytes] | None: ...

    def start(self) -> None: ...


class Program:
    """Python process of the service: the API or a worker."""

    def __init__(self, name: str, arguments: list[str], log: Path, environment: Callable[[], dict[str, str]]) -> None:
        self.name = name
        self.process: Popen[bytes] | None = None
        self.descriptors: tuple[int, ...] = ()
        # -P: do not import a folder called `app` from the current directory.
        self._arguments = [sys.executable, "-P", "-m", *arguments]
        self._log = log
        self._environment = environment

    def start(self) -> None:
        self.process = start_child(
            self._arguments, log=self._log, environment=self._environment(), descriptors=self.descriptors
        )

    def stop(self, grace: float) -> bool:
        """Stop with SIGTERM, and with SIGKILL after `grace` seconds; return False if SIGKILL was needed."""
        return self.process is None or stop_child(self.process, grace)


class SupervisedProcess:
    """Keeps one process running: restarts it when it exits, with an increasing delay."""

    def __init__(self, target: Startable, say: Say, meant: Callable[[int], bool] = lambda _pid: False) -> None:
        """Initialize; `meant(pid)` returns True if another command stopped the process: it is then not restarted."""
        self.target = target
        self._say = say
        self._meant = meant
        self._retired = False
        self._running = target.process is not None
        self._since = self._due = time.monotonic()
        self._failures = 0

    @property
    def pid(self) -> int | None:
        """Process id; None while it does not run."""
        return self.target.process.pid if self._running and self.target.process is not None else None

    def check_process(self) -> bool:
        """Check the process and restart it if due; return True if it exited or was started since the last call."""
        now = time.monotonic()
        if self._running:
            code = self.target.process.poll() if self.target.process is not None else 0
            if code is None:
                return False
            self._running = False
            if self.target.process is not None and self._meant(self.target.process.pid):
                self._retired = True
                self._say(f"{self.target.name} was drained and has exited; the next `anneal up` starts one again")
                return True
            self._failures = 0 if now - self._since > _STABLE_SECONDS else self._failures + 1
            self._back_off(now, f"{self.target.name} {_describe_exit(code)}")
            return True
        if self._retired or now < self._due:
            return False
        try:
            self.target.start()
        except Exception as error:
            # For any reason, the other processes continue, and so do the restarts.
            self._failures += 1
            self._back_off(now, f"{self.target.name} could not be started: {error}")
            return False
        self._running, self._since = True, now
        self._say(f"{self.target.name} was restarted (process {self.pid})")
        return True

    def _back_off(self, now: float, what: str) -> None:
        delay = 0.0 if self._failures <= 1 else min(_MAX_BACKOFF_SECONDS, 0.5 * 2 ** (self._failures - 2))
        self._due = now + delay
        self._say(f"{what}; restarting it" + (f" in {delay:g} s" if delay else ""))


class _StoppedEarly(Exception):
    """Signal that a stop was requested during startup."""


class Up:
    """One `anneal up`; `run` returns the exit code, or raises `SetupError` before anything was started."""

    def __init__(self, settings: Settings, say: Say, shows_key: bool) -> None:
        """Initialize; `shows_key` is False if what is said may be stored where others read it."""
        self.settings = settings
        self._say = _never_failing(say)
        self._shows_key = shows_key
        self._home = settings.home
        self._stopping = False
        self._ready = False
        self._warm = False
        self._key = ""
        self._key_id = ""
        self._url = ""
        self._reported_at = time.monotonic()
        self._publish_again_at = float("inf")
        """Monotonic time at which `connection.json` is written again, because it could not be written before."""
        self._reserve = DatabaseReserve(self._home) if settings.database_url is None else None
        self._trouble = ""
        """Error of the last round of supervision."""
        self._supervised: list[SupervisedProcess] = []

    def run(self) -> int:
        """Start everything, keep it running until SIGINT, SIGTERM or SIGHUP, then stop everything."""
        check_urls(self.settings)
        self._tend_reserve()  # a start needs some room itself
        with HomeLock(self._home), self._catch_signals() as wake, closing(open_listener(self.settings)) as listener:
            self._url = base_url(listener)
            self._key_id = str((read_json(self.settings.connection_file) or {}).get("api_key_id") or "")
            if self.settings.connection_file.exists():
                self._publish_connection()  # it may have the key of a service that was killed
            logs = make_private_folder(self._home / "logs")
            self._logs = [ChildLog(logs / f"{name}.log") for name in ("postgres", "valkey", "api", "worker")]
            self._servers = EmbeddedServers(
                self._home,
                postgres=self.settings.database_url is None,
                valkey=self.settings.redis_url is None,
                trainer_user=self.settings.trainer_user,
            )
            self._api = Program(
                "api",
                ["app.cli.main", "api", "--fd", str(listener.fileno())],
                logs / "api.log",
                self._child_environment,
            )
            self._api.descriptors = (listener.fileno(),)
            self._worker = Program("worker", ["worker.main"], logs / "worker.log", self._child_environment)
            try:
                with suppress(_StoppedEarly):
                    self._start_all()
                while not self._stopping:
                    self._supervise_once()
                    _wait_for_signal(wake)
                self._stop_gracefully()
            finally:
                self._kill_remaining()
        return 0

    @property
    def _worker_grace(self) -> float:
        return self.settings.save_grace_seconds + _WORKER_EXTRA_GRACE_SECONDS

    def _start_all(self) -> None:
        if self._servers.servers:
            self._say(f"Starting {' and '.join(server.name for server in self._servers.servers)} in {self._home} …")
        self._servers.start(self._raise_if_stopping)
        self._raise_if_stopping()
        settings = self._resolved_settings()
        before, after = migrate.upgrade_schema(settings, self._say)
        if before != after:
            self._say(f"Database migrated to revision {after}.")
        # A new one at each start: another user may have listened on the port meanwhile, and been sent the last one.
        self._renew_key()
        self._raise_if_stopping()
        self._say("Starting the API and a worker …")
        self._api.start()
        self._worker.start()
        targets: list[Startable] = [*self._servers.servers, self._api]
        self._supervised = [SupervisedProcess(target, self._say) for target in targets]
        self._supervised.append(
            SupervisedProcess(self._worker, self._say, lambda pid: status_files.was_drained(self._home, pid))
        )
        self._publish_connection()

    def _raise_if_stopping(self) -> None:
        """Raise if a stop was requested; the signal handler does not, because destructors swallow exceptions."""
        if self._stopping:
            raise _StoppedEarly

    def _supervise_once(self) -> None:
        """Look at everything once; whatever fails is said once and tried again, and ends nothing."""
        try:
            self._poll_processes()
            self._trouble = ""
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                self._say(f"The supervision continues, although a part of it failed ({trouble}).")
            self._trouble = trouble

    def _tend_reserve(self) -> None:
        if self._reserve is not None and (change := self._reserve.adjust_reserve()):
            self._say(change)

    def _poll_processes(self) -> None:
        self._tend_reserve()
        changed = [supervised for supervised in self._supervised if supervised.check_process()]
        if changed or time.monotonic() > self._publish_again_at:
            self._publish_connection()
        for log in self._logs:
            for line in log.important_lines():
                self._say(f"{log.name}: {line}")
        if not self._ready and self._is_ready():
            self._ready = True
            self._warm = self._worker_is_warm()
            self._announce_ready()
        elif self._ready and not self._warm and self._worker_is_warm():
            self._warm = True
            self._say("The training libraries are loaded: runs start at once.")

    def _is_ready(self) -> bool:
        status, answer = _call_api("GET", self._url + "/readyz", self._key)
        missing = str(answer.get("detail", ""))
        if status == 401:
            # It was revoked meanwhile.
            self._renew_key()
            self._publish_connection()
        if status == 200:
            if self._worker_registered():
                return True
            missing = "No worker has registered."
        if time.monotonic() - self._reported_at > _NOT_READY_REPORT_SECONDS:
            self._reported_at = time.monotonic()
            self._say(f"Not ready yet: {missing} See the log files in {self._home / 'logs'}.")
        return False

    def _worker_registered(self) -> bool:
        process = self._worker.process
        if process is None:
            return False
        query = select_rows(Worker.id).where(
            Worker.host == socket.gethostname(), Worker.pid == process.pid, Worker.state == "online"
        )
        engine = sync_engine(self._resolved_settings().database_url or "", pool_size=0, name="anneal-up")
        try:
            with engine.connect() as connection:
                return connection.execute(query).first() is not None
        except SQLAlchemyError:
            return False

    def _worker_is_warm(self) -> bool:
        process = self._worker.process
        statuses = status_files.read_statuses(self._home)
        return process is not None and any(note.process.pid == process.pid and note.warm for note in statuses)

    def _announce_ready(self) -> None:
        file = self.settings.connection_file
        key = self._key if self._shows_key else f"in {file}: shown on a terminal only"
        link = self._sign_in_link() if self._shows_key else ""
        curl = f'  curl -H "Authorization: Bearer {self._key}" {self._url}/v1/workers\n\n' if self._shows_key else ""
        self._say(
            "\nAnneal is ready.\n\n"
            f"  URL  {self._url}\n"
            f"  key  {key}\n\n"
            f"{link}"
            f"{curl}"
            f"{'' if self._warm else _WARMING}"
            f"`anneal` on this machine finds both in {file}.\n"
            "This key is valid until the next start; `anneal keys create` makes a lasting one.\n"
            "Ctrl-C or `anneal down` stops it; active runs save a checkpoint and resume at the next start."
        )

    def _sign_in_link(self) -> str:
        """Return a paragraph with a link that signs a browser in; empty if the API does not answer."""
        status, answer = _call_api("POST", self._url + "/v1/session/links", self._key)
        return (
            f"Open the dashboard (this link works once, `anneal open` makes another):\n  {answer['url']}\n\n"
            if status == 201
            else ""
        )

    def _renew_key(self) -> None:
        self._key_id, self._key = renew_admin_key_sync(self._resolved_settings(), self._key_id, "anneal up")

    def _publish_connection(self) -> None:
        pids = {supervised.target.name: supervised.pid for supervised in self._supervised if supervised.pid}
        is_written = self._write_connection(self._key, {"up": os.getpid(), **pids}) and self._servers_are_published()
        self._publish_again_at = float("inf") if is_written else time.monotonic() + _PUBLISH_AGAIN_SECONDS

    def _servers_are_published(self) -> bool:
        return not self._supervised or self._servers.publish_urls()

    def _write_connection(self, key: str, pids: dict[str, int]) -> bool:
        connection = {"url": self._url, "api_key": key, "api_key_id": self._key_id, "pids": pids}
        known = {name: value for name, value in connection.items() if value != ""}
        return try_write_private_json(self.settings.connection_file, known)

    def _resolved_settings(self) -> Settings:
        return self.settings.model_copy(
            update={
                "database_url": self.settings.database_url or self._servers.database_url,
                "redis_url": self.settings.redis_url or self._servers.redis_url,
            }
        )

    def _child_environment(self) -> dict[str, str]:
        # Their logs go to files below ANNEAL_HOME, which people read.
        for_people = {"ANNEAL_LOG_FORMAT": "console"}
        return for_people | self._resolved_settings().child_environment() | {"PYTHONUNBUFFERED": "1"}

    def _stop_gracefully(self) -> None:
        """Stop the worker first: its trainers save, and their updates need the database."""
        self._say("Stopping: runs save a checkpoint and are released (Ctrl-C again stops at once) …")
        if not self._worker.stop(self._worker_grace):
            self._say("The worker did not stop in time and was killed; its runs resume from their last checkpoint.")
        self._api.stop(_API_GRACE_SECONDS)
        self._servers.stop()

    def _kill_remaining(self) -> None:
        """Kill the remaining processes, so that no process outlives `run`; does nothing after a graceful stop."""
        for program in (self._worker, self._api):
            program.stop(0)
        self._servers.stop()
        self._write_connection("", {})
        if self._supervised:
            self._supervised = []
            self._say("Stopped.")

    @contextmanager
    def _catch_signals(self) -> Iterator[int]:
        """Yield a descriptor that becomes readable on a signal, including SIGCHLD when a child exits."""
        wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        def request_stop(number: int, _: object) -> None:
            if self._stopping and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._stopping = True

        handlers: dict[signal.Signals, Callable[[int, object], None]] = {
            signal.SIGINT: request_stop,
            signal.SIGTERM: request_stop,
            signal.SIGHUP: request_stop,
            signal.SIGCHLD: lambda *_: None,
        }
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        previous_descriptor = signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        try:
            yield wake
        finally:
            signal.set_wakeup_fd(previous_descriptor)
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(wake)
            os.close(wake_writer)


def _never_failing(say: Say) -> Say:
    """Return `say` without its errors: what it writes to may be a file on a full disk, or a closed pipe."""

    def say_if_possible(text: str) -> None:
        with suppress(OSError, ValueError):  # a closed stream is a ValueError
            say(text)

    return say_if_possible


def _wait_for_signal(wake: int) -> None:
    """Wait for a signal, at most `_TICK_SECONDS`."""
    if select.select([wake], [], [], _TICK_SECONDS)[0]:
        os.read(wake, 4096)


def _call_api(method: str, url: str, key: str) -> tuple[int, dict[str, Any]]:
    """Send a request; return its status and JSON, or status 0 and a `detail` if there is no response."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=2)
    try:
        connection.request(method, parts.path, headers={"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    except (OSError, ValueError, http.client.HTTPException):
        return 0, {"detail": "The API does not answer."}
    finally:
        connection.close()


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
