"""A local Ray cluster of `ray start` processes: a head without devices, and nodes that tests kill and freeze."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.config import Settings
from tests.ports import free_port
from tests.waiting import eventually

TOKEN = secrets.token_hex(32)


class RayNode:
    """Node of the cluster: `ray start --block` and its processes."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        ports = [f"--{name}={free_port()}" for name in ("dashboard-agent-listen-port", "metrics-export-port")]
        memory = ["--node-ip-address=127.0.0.1", f"--object-store-memory={80 * 2**20}", "--min-worker-port=0"]
        self.log = log
        self.id = ""
        """Id by which Ray knows it."""
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, *memory, "--max-worker-port=0", *ports, *arguments], env=environment, stdout=output,
                stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def raylet(self) -> psutil.Process:
        """The raylet of this node, which starts its workers."""
        return next(one for one in self.processes() if one.name() == "raylet")

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this node, those of its workers among them."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def holds(self, pid: int) -> bool:
        """Return True if a process is one of this node."""
        return any(one.pid == pid for one in self.processes())

    def stop(self) -> None:
        """Kill all processes of this node."""
        every = self.processes()
        self.process.send_signal(signal.SIGTERM)
        _quietly(lambda: self.process.wait(20))
        for process in every:
            _quietly(process.kill)
        _quietly(self.process.kill)
        self.process.wait(20)


class RayCluster:
    """A head without CPUs, on which only the drivers of jobs run, and two nodes with some CPUs each."""

    def __init__(self, settings: Settings, dashboard: int, *, cpus: int = 1, own_homes: bool = False) -> None:
        """Start it; the nodes have the settings of a worker in their environment, but those of the API about Ray.

        With `own_homes`, each has an `ANNEAL_HOME` of its own, as on a machine of its own.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="ray"))  # short, because paths of sockets are
        self.port, self.dashboard = free_port(), dashboard
        self._cpus, self._homes = cpus, settings.home / "nodes" if own_homes else None
        self.url = f"http://127.0.0.1:{self.dashboard}"
        self.client = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)
        inherited = {name: value for name, value in settings.child_environment().items() if "RAY" not in name}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**inherited, "PATH": path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        self.head = self._start(
            "--head", f"--port={self.port}", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self.dashboard}", f"--temp-dir={self._folder}", "--num-cpus=0", "--num-gpus=0",
            f"--ray-client-server-port={free_port()}",
        )  # fmt: skip
        self.nodes: list[RayNode] = []
        try:
            eventually(self._answers, timeout=120, what=f"the head of Ray, see {self.head.log}")
            eventually(self.alive, timeout=60, what="the head is one of the nodes")
            for _ in range(2):
                self.nodes.append(self.add_node())
        except BaseException:
            self._stop_nodes()
            raise

    def add_node(self, labels: str = "zone=a", **environment: str) -> RayNode:
        """Add a node, with further variables if wanted, and wait until the cluster knows it."""
        before = self.alive()
        arguments = [f"--address=127.0.0.1:{self.port}", f"--num-cpus={self._cpus}", "--num-gpus=0"]
        if self._homes is not None:
            environment = {"ANNEAL_HOME": str(self._homes / secrets.token_hex(4)), **environment}
        node = self._start(*arguments, f"--labels={labels}", **environment)
        try:
            (node.id,) = eventually(lambda: self.alive() - before, timeout=90, what="a node of Ray")
        except AssertionError as error:
            node.stop()
            raise AssertionError(f"{error}: {node.log.read_text()[-2000:]}") from error
        return node

    def drain(self, node: RayNode) -> None:
        """Drain a node with the commands of `docs/operations/ray.md`, which name no node where each has a machine."""
        text = (Path(__file__).parents[1] / "docs/operations/ray.md").read_text()
        lines = re.findall(r"^ {4}((?:ray drain-node|anneal worker --drain) .*)$", text, re.MULTILINE)
        assert len(lines) == 2, lines
        lines[0] += f" --address 127.0.0.1:{self.port} --node-id {node.id}"
        for line in lines:
            subprocess.run(["bash", "-c", line], env=self.environment, check=True, timeout=90)

    def alive(self) -> set[str]:
        """Return the ids of the nodes that are alive, that of the head among them."""
        nodes = self.client.get("/nodes", params={"view": "summary"}).json()["data"]["summary"]
        return {one["raylet"]["nodeId"] for one in nodes if one["raylet"].get("state") == "ALIVE"}

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Return all jobs by their submission id."""
        return {one["submission_id"]: one for one in self.client.get("/api/jobs/").json() if one["submission_id"]}

    def log_of(self, job_id: str) -> str:
        """Return what a job has printed."""
        return str(self.client.get(f"/api/jobs/{job_id}/logs").json()["logs"])

    def stop(self) -> None:
        """Kill all processes."""
        self.client.close()
        self._stop_nodes()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stop_nodes(self) -> None:
        for node in [*self.nodes, self.head]:
            node.stop()

    def _start(self, *arguments: str, **environment: str) -> RayNode:
        number = len(list(self._folder.glob("start-*")))
        log = self._folder / f"start-{number}.log"
        return RayNode(list(arguments), {**self.environment, **environment}, log)

    def _answers(self) -> bool:
        assert self.head.process.poll() is None, self.head.log.read_text()[-3000:]
        try:
            return self.client.get("/api/version").status_code == 200
        except httpx.TransportError:
            return False


def _quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except (psutil.NoSuchProcess, ProcessLookupError, subprocess.TimeoutExpired):
        pass
