"""Service under test in a campaign: two API replicas, two or three workers, PostgreSQL and Valkey behind proxies."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
from sqlalchemy import Engine

from app.api_keys.service import create_key_sync
from app.config import Settings
from app.infra.db import sync_engine
from app.standalone.servers import EmbeddedServers
from app.tables import migrate
from tests import clusters
from tests.chaos.inject import Orders
from tests.chaos.machine import SLOWNESS
from tests.chaos.proxy import Proxies, Proxy
from tests.ports import free_port
from tests.waiting import eventually
from tests.worker.training.tiny import make_chat_dataset, make_tiny_model
from worker.wire.journal import read_journal

LEASE_SECONDS = 3.0 * SLOWNESS
HANG_SECONDS = 20.0
"""Longer than a restarted worker takes on a busy machine to load what it forks training processes from: until then a
process of another host, which waits for it, is silent too."""
RUN_LOCK = "trainer.lock"
STORAGE_BYTES = 192 * 2**20
_REPOSITORY = Path(__file__).parents[2]


class Service:
    """Process of the service (an API replica or a worker), which can be killed, frozen and restarted."""

    def __init__(
        self,
        world: "World",
        name: str,
        module: str,
        arguments: list[str],
        shares_no_locks: bool = False,
        **values: Any,
    ) -> None:
        self.name = name
        self.log = world.home / f"{name}.log"
        self.postgres, self.valkey = world.ways()
        settings = world.settings.model_copy(
            update={
                "database_url": self.postgres.url,
                "redis_url": self.valkey.url,
                **values,
            }
        )
        site = world.home / "site" / name
        site.mkdir(parents=True)
        clock = world.orders_folder / "clock" / name
        # Its trainers load this too, because they inherit PYTHONPATH.
        (site / "sitecustomize.py").write_text(
            "from pathlib import Path\nfrom tests.chaos.inject import let_clock_jump, lock_nothing, note_lives\n"
            f"let_clock_jump(Path({str(clock)!r}))\n"
            + (f"lock_nothing({RUN_LOCK!r})\n" if shares_no_locks else "")
            + (f"note_lives(Path({str(world.lives)!r}))\n" if module == "worker.main" else "")
        )
        self._environment = settings.child_environment() | {"PYTHONPATH": f"{site}{os.pathsep}{_REPOSITORY}"}
        self._environment.setdefault("OMP_NUM_THREADS", "1")
        prefix = [sys.executable, "-m", "tests.chaos.process", str(world.orders_folder), name]
        self._command = [*prefix, module, *arguments]
        self.process: subprocess.Popen[bytes] | None = None
        self.pids: set[int] = set()
        """Ids of all its processes, including earlier ones."""

    def start(self) -> None:
        """Start or restart the process."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=output, stderr=output, cwd=_REPOSITORY
            )
        self.pids.add(self.process.pid)

    @property
    def pid(self) -> int:
        """Current process id."""
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """True if the process has not exited."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(30)

    def terminate(self, timeout: float) -> float:
        """Send SIGTERM and return the seconds until the process has exited."""
        assert self.process is not None
        began = time.monotonic()
        self.process.terminate()
        self.process.wait(timeout)
        return time.monotonic() - began

    def said(self) -> str:
        """Return its log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def zygote(self) -> psutil.Process | None:
        """Return the zygote from which its trainers are forked, or None."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                if "worker.process.zygote" in " ".join(child.cmdline()):
                    return child
        return None


class World:
    """All servers and processes of a campaign, with access to their state from outside."""

    def __init__(self, home: Path, seed: int, with_hosts: bool = False) -> None:
        """Start everything; `with_hosts`: with a further worker, which trains runs together with the first one."""
        self.home = home
        self.lives = home / "lives"
        self.lives.mkdir()
        self.random = random.Random(seed)
        self.orders_folder = home / "orders"
        (self.orders_folder / "clock").mkdir(parents=True)
        self.orders = Orders(self.orders_folder)
        self.storage = home / "storage"
        self.storage.mkdir()
        self.has_small_disk = _mount(self.storage)
        clusters.copy_to(home)
        self.servers = EmbeddedServers(home)
        self.servers.start()
        self.proxies = Proxies()
        self.settings = Settings(
            home=home,
            storage=self.storage,
            database_url=self.servers.database_url,
            redis_url=self.servers.redis_url,
            port=0,
            lease_seconds=LEASE_SECONDS,
            hang_seconds=HANG_SECONDS,
            preempt_after_seconds=1.0,
            preempt_min_seconds=0.0,
            disk_reserve_bytes=0,  # runs may use the whole small disk, and a fault fills it
        )
        migrate.upgrade_schema(self.settings)
        self.engine: Engine = sync_engine(self.settings.database_url or "", name="chaos")
        self.key = create_key_sync(self.settings, "chaos", ["admin"])
        make_tiny_model(self.settings.models_folder / "tiny", hidden=32, layers=2, dropout=0.1)
        self.apis = [self._api(f"api-{number}") for number in (1, 2)]
        together = {"group_interface": "lo"} if with_hosts else {}
        self.workers = [
            Service(self, "worker-1", "worker.main", [], launch="zygote", slots=2, **together),
            # The second starts its trainers cold and has no torch, so it takes only runs of the fake backend. It acts
            # as on another machine, without the file lock of a run.
            Service(self, "worker-2-without-torch", "worker.main", [], shares_no_locks=True, launch="cold", slots=2),
        ]
        if with_hosts:
            further = {"launch": "zygote", "slots": 1, **together}
            self.workers.append(Service(self, "worker-3", "worker.main", [], shares_no_locks=True, **further))
        for service in self.services:
            service.start()
        for api in self.apis:
            self.wait_until_answers(api)
        self.datasets = self._upload()
        self.wait_for_workers()

    @property
    def services(self) -> list[Service]:
        """All processes of the service itself."""
        return [*self.apis, *self.workers]

    def ways(self) -> tuple[Proxy, Proxy]:
        """Create proxies to PostgreSQL and Valkey."""
        assert self.servers.postgres is not None and self.servers.valkey is not None
        return self.proxies.to(self.servers.postgres.url), self.proxies.to(self.servers.valkey.url)

    def address(self, api: Service) -> str:
        """Return the base URL of a replica."""
        return f"http://127.0.0.1:{self._ports[api.name]}"

    def client(self, api: Service | None = None, timeout: float = 10) -> httpx.Client:
        """Return a client of a replica (default: a random one)."""
        api = api or self.random.choice(self.apis)
        headers = {"Authorization": f"Bearer {self.key}"}
        # No TLS here, and loading the certificates takes longer than most requests.
        return httpx.Client(base_url=self.address(api), headers=headers, timeout=timeout, trust_env=False, verify=False)

    def wait_until_answers(self, api: Service) -> None:
        """Wait until the replica responds."""

        def answers() -> bool:
            assert api.is_running, api.said()[-3000:]
            try:
                with self.client(api, timeout=2) as client:
                    return client.get("/readyz").status_code == 200
            except httpx.HTTPError:
                return False

        eventually(answers, timeout=60, what=f"{api.name} answers, see {api.log}")

    def wait_for_workers(self) -> None:
        """Wait until all workers are registered."""

        def registered() -> bool:
            for worker in self.workers:
                assert worker.is_running, worker.said()[-3000:]
            pids = {row["pid"] for row in self.rows("SELECT pid FROM workers WHERE state = 'online'")}
            return {worker.pid for worker in self.workers} <= pids

        eventually(registered, timeout=60, what="all workers are registered")

    def rows(self, statement: str, **values: Any) -> list[dict[str, Any]]:
        """Query the database directly, without the proxies."""
        from sqlalchemy import text
        from sqlalchemy.exc import DBAPIError

        for _ in range(2):
            try:
                with self.engine.connect() as connection:
                    return [dict(row) for row in connection.execute(text(statement), values).mappings()]
            except DBAPIError as error:
                last = error  # PostgreSQL was restarted: the pool reconnects on the next try
        raise last

    def live_runs(self, worker: Service | None = None) -> list[dict[str, Any]]:
        """Return the live runs of a worker (default: of all), newest first."""
        runs = self.rows(
            "SELECT runs.id, runs.name, runs.status, runs.attempt, runs.current_step, workers.pid AS worker_pid "
            "FROM runs JOIN workers ON workers.id = runs.lease_owner "
            "WHERE runs.status IN ('initializing', 'running', 'checkpointing') ORDER BY runs.id DESC"
        )
        return [run for run in runs if worker is None or run["worker_pid"] == worker.pid]

    def worker_names(self) -> dict[str, str]:
        """Return the service name of every worker that ever registered, by worker id."""
        rows = self.rows("SELECT id, pid FROM workers")
        return {row["id"]: worker.name for row in rows for worker in self.workers if row["pid"] in worker.pids}

    def members(self, run_id: str) -> list[Service]:
        """Return the workers of the other hosts of a live run."""
        rows = self.rows(
            "SELECT workers.pid FROM run_parts JOIN workers ON workers.id = run_parts.worker_id "
            "WHERE run_parts.run_id = :run AND run_parts.ended_at IS NULL",
            run=run_id,
        )
        return [worker for row in rows for worker in self.workers if worker.pid == row["pid"]]

    def overlaps(self) -> tuple[str, ...]:
        """Return the training processes that began while one of an earlier attempt was alive, and forget them."""
        path = self.lives / "overlaps"
        lines = tuple(path.read_text().splitlines()) if path.exists() else ()
        path.unlink(missing_ok=True)
        return lines

    def journal(self, run_id: str) -> list[dict[str, Any]]:
        """Return the journal that the trainers of a run wrote."""
        return read_journal(self.storage / "runs" / run_id / "journal.jsonl")

    def trainer(self, run_id: str) -> psutil.Process | None:
        """Return the last training process in the journal if it is alive, else None."""
        lines = self.journal(run_id)
        if lines:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(lines[-1]["pid"])
                above = {parent.pid for parent in process.parents()}
                if process.status() != psutil.STATUS_ZOMBIE and above & {worker.pid for worker in self.workers}:
                    return process
        return None

    def redis(self) -> redis.Redis:
        """Return a direct connection to Valkey."""
        return redis.Redis.from_url(self.settings.redis_url or "", socket_timeout=5)

    def down(self, server: Any) -> None:
        """Kill an embedded server with SIGKILL."""
        assert server is not None and server.process is not None
        process = psutil.Process(server.process.pid)
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                member.kill()
        server.process.wait(30)

    def up(self, server: Any) -> None:
        """Restart an embedded server with the same port and data."""
        server.start()
        server.wait_ready()

    def server_processes(self, server: Any) -> list[psutil.Process]:
        """Return all processes of an embedded server."""
        process = psutil.Process(server.process.pid)
        return [process, *process.children(recursive=True)]

    def close(self) -> None:
        """Stop all processes."""
        for service in self.services:
            if service.is_running:
                with contextlib.suppress(ProcessLookupError):
                    service.signal(signal.SIGCONT)
                    service.kill()
        self.proxies.close()
        self.engine.dispose()
        self.servers.stop()
        if self.has_small_disk:
            subprocess.run(["umount", "--lazy", str(self.storage)], check=True)

    def _api(self, name: str) -> Service:
        self._ports = getattr(self, "_ports", {})
        self._ports[name] = free_port()
        arguments = ["--factory", "app.main:create_app", "--host", "127.0.0.1", "--port", str(self._ports[name])]
        return Service(
            self, name, "uvicorn", [*arguments, "--log-level", "warning", "--timeout-graceful-shutdown", "5"]
        )

    def _upload(self) -> dict[str, str]:
        texts = self.home / "texts.jsonl"
        texts.write_bytes(b"".join(b'{"text": "row %d"}\n' % number for number in range(50)))
        chats = make_chat_dataset(self.home / "chats.jsonl", 60)
        ids = {}
        with self.client(self.apis[0]) as client:
            for backend, path in (("fake", texts), ("celery", chats)):
                answer = client.post("/v1/datasets", files={"file": (path.name, path.read_bytes())})
                assert answer.status_code == 201, answer.text
                ids[backend] = answer.json()["id"]
        return ids


def _mount(folder: Path) -> bool:
    """Mount a small file system that can be filled; return False if this user may not mount."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={STORAGE_BYTES}", "chaos", str(folder)], capture_output=True
    )
    return done.returncode == 0
