"""The whole service as real processes on dedicated servers, which tests can kill, freeze and restart."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import redis
from sqlalchemy import Engine

from app.config import Settings
from app.infra.db import sync_engine
from app.standalone.servers import EmbeddedServers
from app.tables import migrate
from tests import clusters, programs
from tests.server import ProcessServer
from tests.slowness import slowness
from tests.waiting import eventually
from worker.wire.journal import read_journal


class WorkerProcess:
    """Worker process: `python -m worker.main`."""

    def __init__(
        self,
        settings: Settings,
        log: Path,
        under: Sequence[str] = (),
        program: str = "worker.main",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start it; `under` is a command that executes it, with its arguments.

        `program` is a module that runs the worker in another way; `variables` join its environment.
        """
        self.log = log
        self.process: programs.Process
        if under:
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    [*under, sys.executable, "-m", "worker.main"],
                    env=settings.child_environment(), stdout=output, stderr=output,
                )  # fmt: skip
        else:
            self.process = programs.start(program, [], {**settings.child_environment(), **variables}, log)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.wait(timeout=30)

    def terminate(self, timeout: float = 60) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=timeout)

    def freeze(self) -> None:
        """Suspend the process with SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the process with SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def descendants(self) -> list[psutil.Process]:
        """Return the zygote and the training processes."""
        return psutil.Process(self.process.pid).children(recursive=True)


class Stack:
    """PostgreSQL, Valkey, an API and workers with one home folder."""

    def __init__(self, home: Path, *, lease_seconds: float = 15.0, **values: Any) -> None:
        """Start the servers and the API; the lease is `lease_seconds` times the machine's slowness.

        Trainers end after two thirds of a lease without a renewal: the default lets a busy machine stop a process for
        seconds. Tests of what happens then give their workers a lease of `short_lease`.
        """
        self.slowness = slowness()
        self.home = home
        clusters.copy_to(home)
        self.servers = EmbeddedServers(home)
        self.servers.start()
        self.settings = Settings(
            **{
                "home": home,
                "database_url": self.servers.database_url,
                "redis_url": self.servers.redis_url,
                "port": 0,
                "lease_seconds": min(lease_seconds * self.slowness, 3600.0),
                "launch": "cold",
                **values,
            }
        )
        migrate.upgrade_schema(self.settings)
        self.engine: Engine = sync_engine(self.settings.database_url or "")
        self.workers: list[WorkerProcess] = []
        self.api = ProcessServer(self.settings)
        self.api.start()
        self.api.wait_until_up()
        self.dataset_id = self.upload(b"".join(b'{"text": "row %d"}\n' % n for n in range(50)))

    @property
    def short_lease(self) -> float:
        """Seconds of a lease that a test can wait for; its trainers still outlive a stop of three seconds."""
        return 6.0 * self.slowness

    @property
    def client(self) -> httpx.Client:
        """HTTP client with an admin key."""
        return self.api.client

    def add_worker(self, under: Sequence[str] = (), **values: Any) -> WorkerProcess:
        """Start another worker, if wanted by the command `under`, and wait until it is registered."""
        settings = self.settings.model_copy(update=values)
        worker = self._start_worker(settings, self.home / f"worker-{len(self.workers)}.log", under)
        self.workers.append(worker)
        eventually(lambda: self._is_registered(worker), timeout=120, what=f"worker registered, see {worker.log}")
        return worker

    def upload(self, content: bytes, name: str = "rows.jsonl") -> str:
        """Upload a dataset and return its id."""
        answer = self.client.post("/v1/datasets", files={"file": (name, content)})
        assert answer.status_code == 201, answer.text
        dataset_id: str = answer.json()["id"]
        return dataset_id

    def create(self, extra: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **body: Any) -> str:
        """Create a run of the fake backend and return its id."""
        config = {"base_model": "any", "method": "sft", "extra": extra or {}, **(config or {})}
        body = {"backend": "fake", "dataset_id": self.dataset_id, "config": config, **body}
        answer = self.client.post("/v1/runs", json=body)
        assert answer.status_code == 202, answer.text
        run_id: str = answer.json()["id"]
        return run_id

    def run(self, run_id: str) -> dict[str, Any]:
        """Return the run as the API shows it."""
        answer = self.client.get(f"/v1/runs/{run_id}")
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    def until(self, run_id: str, *statuses: str, timeout: float = 120) -> dict[str, Any]:
        """Wait for one of the statuses, across restarts of the API."""
        return eventually(
            lambda: self._in_status(run_id, statuses), timeout, what=f"{run_id} becomes {' or '.join(statuses)}"
        )

    def until_step(self, run_id: str, step: int, timeout: float = 120) -> None:
        """Wait until the trainers' journal contains that step."""
        eventually(lambda: any(line.get("step", 0) >= step for line in self.journal(run_id)), timeout)

    def stop(self, run_id: str, save_checkpoint: bool = True) -> httpx.Response:
        """Request a stop of the run."""
        return self.client.post(f"/v1/runs/{run_id}/stop", json={"save_checkpoint": save_checkpoint})

    def journal(self, run_id: str) -> list[dict[str, Any]]:
        """Return the journal that the trainers wrote."""
        path = self.settings.storage_root / "runs" / run_id / "journal.jsonl"
        return read_journal(path) if path.exists() else []

    def events(self, run_id: str) -> list[dict[str, Any]]:
        """Return all stored events with `type`, after checking that `seq` has no gap."""
        answer = self.client.get(f"/v1/runs/{run_id}/events", params={"follow": "false", "format": "ndjson"})
        assert answer.status_code == 200, answer.text
        import json

        events = [json.loads(line) for line in answer.text.splitlines()]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        return events

    def redis(self) -> redis.Redis:
        """Return a connection to Valkey."""
        return redis.Redis.from_url(self.settings.redis_url or "")

    def kill_postgres(self) -> None:
        """Kill all processes of PostgreSQL with SIGKILL and restart it on the same data."""
        self.restart(self.servers.postgres)

    def kill_valkey(self) -> None:
        """Do the same with Valkey."""
        self.restart(self.servers.valkey)

    def restart(self, server: Any) -> None:
        """Kill all processes of a server with SIGKILL and restart it on the same port."""
        self.kill(server)
        self.start(server)

    def kill(self, server: Any) -> None:
        """Kill all processes of a server with SIGKILL."""
        assert server is not None
        for process in [
            psutil.Process(server.process.pid),
            *psutil.Process(server.process.pid).children(recursive=True),
        ]:
            _quietly(process.kill)
        server.process.wait(timeout=30)

    def start(self, server: Any) -> None:
        """Start a killed server on the same port and the same data."""
        server.start()
        server.wait_ready()

    def close(self) -> None:
        """Stop all processes."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.thaw()
                worker.kill()
        self.api.client.close()
        self.api.stop()
        self.engine.dispose()
        self.servers.stop()

    def _start_worker(self, settings: Settings, log: Path, under: Sequence[str]) -> WorkerProcess:
        return WorkerProcess(settings, log, under)

    def _is_registered(self, worker: WorkerProcess) -> bool:
        assert worker.process.poll() is None, worker.log.read_text()[-3000:]
        workers = self.client.get("/v1/workers").json()["data"]
        return any(row["pid"] == worker.process.pid and row["state"] == "online" for row in workers)

    def _in_status(self, run_id: str, statuses: tuple[str, ...]) -> dict[str, Any] | None:
        try:
            shown = self.run(run_id)
        except (httpx.TransportError, AssertionError):
            return None
        return shown if shown["status"] in statuses else None


class Follower:
    """Client that follows a run's stream in a thread and always reconnects, with `Last-Event-ID`."""

    def __init__(self, stack: Stack, run_id: str, reconnect_every: int | None = None) -> None:
        self.ids: list[int] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.connections = 0
        self._stack = stack
        self._path = f"/v1/runs/{run_id}/events"
        self._reconnect_every = reconnect_every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._thread.start()

    def join(self, timeout: float = 120) -> list[int]:
        """Wait for the `end` event and return the received ids."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"no end event; the last seen: {self.events[-3:]}"
        return self.ids

    def _follow(self) -> None:
        from httpx_sse import connect_sse

        while not self._over.is_set():
            headers = {"Last-Event-ID": str(self.ids[-1])} if self.ids else {}
            self.connections += 1
            try:
                with (
                    self._stack.api.client_with(self._stack.api.key) as client,
                    connect_sse(client, "GET", self._path, headers=headers) as stream,
                ):
                    for count, event in enumerate(stream.iter_sse(), 1):
                        self.ids.append(int(event.id))
                        self.events.append((event.event, event.json()))
                        if event.event == "end":
                            return
                        if self._reconnect_every and count >= self._reconnect_every:
                            break
            except Exception:
                self._over.wait(0.05)  # the API is down or has just been killed


def pids_of_trainers(run_events: list[dict[str, Any]]) -> list[int]:
    """Return the process ids in a journal, in start order."""
    return [line["pid"] for line in run_events if line["event"] == "start"]


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_attempts_never_overlap(journal: list[dict[str, Any]]) -> None:
    """Check that attempts, and steps within an attempt, increase in the order of the journal."""
    attempts = [line["attempt"] for line in journal]
    assert attempts == sorted(attempts), attempts
    for attempt in set(attempts):
        steps = [line["step"] for line in journal if line["attempt"] == attempt and line["event"] == "step"]
        assert steps == sorted(set(steps))


def _quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process."""
    os.kill(pid, number)
