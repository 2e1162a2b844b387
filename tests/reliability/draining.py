"""Replicas, readers, slow uploads and commands for the tests of ending and draining."""

import os
import socket
import time
from pathlib import Path

import httpx
from httpx_sse import aconnect_sse
from sqlalchemy import text

from tests import programs
from tests.server import ApiServer
from tests.stack import Stack, WorkerProcess, assert_attempts_never_overlap
from tests.waiting import eventually


class Replica(ApiServer):
    """`anneal api`."""

    def start(self) -> None:
        self.log = self.settings.home / f"api-{self.port}.log"
        environment = self.settings.child_environment()
        self.process = programs.start("app.cli.main", ["api", "--port", str(self.port)], environment, self.log)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)


class Reader:
    """Follows a run, by its last id, on one replica and then on the others; the moments at which streams ended."""

    def __init__(self, servers: list[ApiServer], run_id: str) -> None:
        self.ids: list[int] = []
        self.ends: list[float] = []
        self.broken = 0
        self._servers = servers
        self._path = f"/v1/runs/{run_id}/events"

    async def follow(self) -> None:
        """Until the run's end."""
        turn = 0
        while True:
            server = self._servers[turn % len(self._servers)]
            headers = {"Authorization": f"Bearer {server.key}"}
            if self.ids:
                headers["Last-Event-ID"] = str(self.ids[-1])
            try:
                async with (
                    httpx.AsyncClient(base_url=server.url, headers=headers, timeout=30, verify=False) as client,
                    aconnect_sse(client, "GET", self._path) as source,
                ):
                    async for event in source.aiter_sse():
                        self.ids.append(int(event.id))
                        if event.event == "end":
                            return
            except httpx.RemoteProtocolError:
                self.broken += 1
            except httpx.ConnectError:
                pass
            self.ends.append(time.monotonic())
            turn += 1


def deaf_reader(server: ApiServer, path: str) -> socket.socket:
    """A connection that has asked for a stream and never reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.key}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


class SlowUpload:
    """An upload that is under way when the server is told to end."""

    def __init__(self, server: ApiServer) -> None:
        rows = b"".join(b'{"text": "slow %d"}\n' % n for n in range(200))
        part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="slow.jsonl"\r\n\r\n'
        body = part + rows + b"\r\n--x--\r\n"
        head = (
            f"POST /v1/datasets HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.key}\r\n"
            f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._rest = body[1000:]
        self._connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self._connection.sendall(head.encode() + body[:1000])

    def finish(self) -> str:
        """Send the rest; answers the status line."""
        self._connection.sendall(self._rest)
        with self._connection, self._connection.makefile("rb") as answer:
            return answer.readline().decode()


class Command:
    """`anneal worker …` on a home, knowing neither database nor broker."""

    def __init__(self, home: Path, *arguments: str) -> None:
        environment = {**os.environ, "ANNEAL_HOME": str(home), "ANNEAL_LEASE_SECONDS": "3", "COLUMNS": "200"}
        self._output = home / f"command-{time.monotonic_ns()}.out"
        self.process = programs.start("app.cli.main", ["worker", *arguments], environment, self._output)

    @property
    def said(self) -> str:
        """Its output so far."""
        return self._output.read_text()

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and the output."""
        code = self.process.wait(60)
        return code, self.said


def add_workers(stack: Stack, count: int) -> None:
    """Several at once: most of a start is imports."""
    started = [WorkerProcess(stack.settings, stack.home / f"worker-of-many-{n}.log") for n in range(count)]
    stack.workers.extend(started)
    eventually(lambda: all(states(stack).get(one.process.pid) == "online" for one in started), timeout=60)


def losses(stack: Stack, run_id: str) -> dict[int, str]:
    """Step → exact loss."""
    return {line["step"]: line["loss_hex"] for line in stack.journal(run_id) if line["event"] == "step"}


def lost_count(stack: Stack, run_id: str) -> int:
    with stack.engine.connect() as connection:
        return int(connection.scalar(text("SELECT lost_count FROM runs WHERE id = :id"), {"id": run_id}))


def owner(stack: Stack, run_id: str) -> WorkerProcess:
    """The worker that trains a run."""

    def at_work() -> list[int]:
        rows = stack.client.get("/v1/workers").json()["data"]
        return [row["pid"] for row in rows if run_id in row["runs"]]

    (pid,) = eventually(at_work, what=f"somebody trains {run_id}")
    return next(worker for worker in stack.workers if worker.process.pid == pid)


def states(stack: Stack) -> dict[int, str]:
    """Process id → state of the workers that there are and were."""
    return {row["pid"]: row["state"] for row in stack.client.get("/v1/workers").json()["data"]}


def assert_trained_once(stack: Stack, run_id: str) -> None:
    """Every step was trained once, in order, whoever trained it."""
    journal = stack.journal(run_id)
    assert_attempts_never_overlap(journal)
    steps = [line["step"] for line in journal if line["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
