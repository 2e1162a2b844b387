"""`python -m tests.soak [--seconds N]`: exit code 1 if the API or a worker uses more memory than documented.

300 readers that take nothing stay connected while a hostile run floods its log and its metrics, and while clients send
what earlier attacks sent: costly patterns, large rows, trailers without an end, and requests for all curves.
"""

import argparse
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.stack import Stack
from tests.waiting import eventually

READERS = 300
MOST_ADDED = 300 * 2**20
"""Bytes that the API, and a worker, may use beyond what they use idle."""
MOST_KEPT = 100 * 2**20
"""The same once the attackers have left."""
MOST_WAIT = 10.0
"""Seconds within which `GET /healthz` is answered."""
_EVERY = 0.02
_SLOW = {"type": "regex", "pattern": "(?i)" + r"[ -\uffff]" * 99}
_ROW = b'{"text": "t", "x": [' + b"[]," * 5_000_000 + b"0]}\n"
_CHUNKED = b"POST /v1/experiments HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
_TRAILERS = b"A: xxxxxxx\r\n" * 5000


class Gauge:
    """Samples the memory of the API and a worker, and the latency of `GET /healthz`, and prints them by phase."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._processes = [psutil.Process(pid) for pid in (stack.api.process.pid, stack.workers[0].process.pid)]
        self._peaks = self.memory()
        self._waits: list[float] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._weigh, self._ask)]
        self.highest = list(self._peaks)
        self.longest = 0.0
        for thread in self._threads:
            thread.start()

    def memory(self) -> list[int]:
        """Return the resident bytes of the API and of the worker."""
        return [process.memory_info().rss for process in self._processes]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure during the block, and print a line."""
        self._peaks, self._waits = self.memory(), []
        yield
        waits = sorted(self._waits)
        self.longest = max(self.longest, waits[-1])
        self.highest = [max(pair) for pair in zip(self.highest, self._peaks, strict=True)]
        half, most = (waits[int(len(waits) * part)] * 1000 for part in (0.5, 0.99))
        api, worker = (peak / 2**20 for peak in self._peaks)
        print(f"{name:34s} {api:8.0f} {worker:8.0f} {half:10.1f} {most:10.1f} {waits[-1] * 1000:10.1f}", flush=True)

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _weigh(self) -> None:
        while not self._over.wait(_EVERY):
            with suppress(psutil.NoSuchProcess):
                self._peaks = [max(pair) for pair in zip(self._peaks, self.memory(), strict=True)]

    def _ask(self) -> None:
        with self._stack.api.client_with(None) as client:
            while not self._over.wait(_EVERY):
                began = time.monotonic()
                with suppress(httpx.HTTPError):
                    client.get("/healthz")
                self._waits.append(time.monotonic() - began)


class Attack:
    """Attackers of one service, each of which goes on until `seconds` have passed."""

    def __init__(self, stack: Stack, seconds: float) -> None:
        self._stack = stack
        self._seconds = seconds
        self.quiet = self._run({"steps": 1000, "step_seconds": 3600.0})
        self.hostile = ""
        self._readers: list[socket.socket] = []

    def connect(self, paths: Sequence[str]) -> None:
        """Open streams, of which nothing is read."""
        for path in paths:
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", self._stack.api.port))
            key = f"Authorization: Bearer {self._stack.api.key}"
            reader.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{key}\r\n\r\n".encode())
            self._readers.append(reader)

    def leave(self) -> None:
        """Close all streams, and stop the runs."""
        for reader in self._readers:
            reader.close()
        for run_id in (self.hostile, self.quiet):
            self._stack.stop(run_id, save_checkpoint=False)

    def start_hostile_run(self) -> None:
        """Start a run that prints, and reports metrics of ever new names, as fast as its worker reads."""
        noise = {"log_lines_per_step": 200, "log_line": "x" * 8000, "metric_values": 5000}
        self.hostile = self._run({"steps": 1_000_000, "step_seconds": 0.0, **noise}, {"logging_steps": 1})
        self._stack.until_step(self.hostile, 30)

    def wait(self) -> None:
        """Wait for the duration of a phase."""
        threading.Event().wait(self._seconds)

    def send_patterns(self) -> None:
        """Have patterns compiled that take seconds."""
        body = {
            "dataset_id": self._stack.dataset_id,
            "config": {"base_model": "x", "method": "rlhf", "rlhf": {"rewards": [_SLOW]}},
        }
        self._repeat(8, lambda client: client.post("/v1/runs/validate", json=body))

    def send_rows(self) -> None:
        """Upload rows of 15 MB with five million values."""
        self._repeat(6, lambda client: client.post("/v1/datasets", files={"file": ("x.jsonl", _ROW)}))

    def send_trailers(self) -> None:
        """Send trailers without an end, and without a key."""

        def send(_: httpx.Client) -> None:
            with socket.create_connection(("127.0.0.1", self._stack.api.port)) as connection, suppress(OSError):
                connection.sendall(_CHUNKED)
                while True:
                    connection.sendall(_TRAILERS)

        self._repeat(3, send)

    def read_curves(self) -> None:
        """Request all curves of the hostile run, its state and its log."""
        paths = ("metrics?max_points=100000", "", "logs", "postmortem")

        def read(client: httpx.Client) -> None:
            for path in paths:
                client.get(f"/v1/runs/{self.hostile}/{path}".rstrip("/"))

        self._repeat(4, read)

    def _repeat(self, count: int, send: Callable[[httpx.Client], Any]) -> None:
        until = time.monotonic() + self._seconds

        def repeat() -> None:
            with self._stack.api.client_with(self._stack.api.key) as client:
                while time.monotonic() < until:
                    with suppress(httpx.HTTPError):
                        send(client)

        with ThreadPoolExecutor(count) as pool:
            for done in [pool.submit(repeat) for _ in range(count)]:
                done.result()

    def _run(self, extra: dict[str, Any], config: dict[str, Any] | None = None) -> str:
        run_id = self._stack.create(extra, config)
        self._stack.until(run_id, "running")
        return run_id


def soak(stack: Stack, seconds: float) -> list[str]:
    """Attack the service, print what it uses meanwhile, and return which bounds it exceeds."""
    stack.add_worker(slots=2)
    attack = Attack(stack, seconds)
    _use_everything_once(stack, attack.quiet)
    gauge = Gauge(stack)
    print(f"{'':34s} {'API MiB':>8s} {'worker':>8s} {'/healthz':>10s} {'p99 ms':>10s} {'longest':>10s}")
    with gauge.phase("idle"):
        attack.wait()
    idle = gauge.memory()
    quiet = f"/v1/runs/{attack.quiet}"
    with gauge.phase(f"{READERS} readers"):
        attack.connect([f"{quiet}/events", f"{quiet}/logs?follow=true", "/v1/events?after=0"] * (READERS // 3))
        attack.wait()
    with gauge.phase("and a hostile run"):
        attack.start_hostile_run()
        hostile = f"/v1/runs/{attack.hostile}"
        attack.connect([f"{hostile}/events?after={number}" for number in range(READERS // 3)])
        attack.wait()
    for name, send in (
        ("and costly patterns", attack.send_patterns),
        ("and large rows", attack.send_rows),
        ("and trailers without an end", attack.send_trailers),
        ("and requests for its curves", attack.read_curves),
    ):
        with gauge.phase(name):
            send()
    attack.leave()
    stack.until(attack.hostile, "cancelled")
    eventually(lambda: _open_streams(stack) == 0, what="all streams are closed")
    with suppress(AssertionError), gauge.phase("after"):
        attack.wait()
        eventually(lambda: not _excess(idle, gauge.memory(), MOST_KEPT), what="the memory is returned")
    memory_before = gauge.memory()
    gauge.close()
    exceeded = [f"{who} at its peak" for who in _excess(idle, gauge.highest, MOST_ADDED)]
    exceeded += [f"{who} afterwards" for who in _excess(idle, memory_before, MOST_KEPT)]
    return exceeded + (["/healthz"] if gauge.longest > MOST_WAIT else [])


def _use_everything_once(stack: Stack, run_id: str) -> None:
    """Let the API import what it needs, so that this does not count."""
    for path in ("events?follow=false", "logs", "metrics", "postmortem"):
        stack.client.get(f"/v1/runs/{run_id}/{path}")
    stack.client.get("/v1/events?follow=false&after=0")
    config = {"base_model": "x", "method": "rlhf", "rlhf": {"rewards": [{"type": "regex", "pattern": "a"}]}}
    stack.client.post("/v1/runs/validate", json={"dataset_id": stack.dataset_id, "config": config})


def _open_streams(stack: Stack) -> float:
    metrics = stack.client.get("/metrics").text
    return sum(float(count) for count in re.findall(r"^anneal_streams\{.*\} (\S+)$", metrics, re.MULTILINE))


def _excess(idle: Sequence[int], used: Sequence[int], most: int) -> list[str]:
    names = ("the API", "the worker")
    return [
        f"{name}: {(now - before) / 2**20:.0f} MiB more than idle, the bound is {most / 2**20:.0f}"
        for name, before, now in zip(names, idle, used, strict=True)
        if now - before > most
    ]


def main() -> int:
    """Run the soak on a service of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Attack a service and measure it.")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each of eight phases")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="anneal-soak-", ignore_cleanup_errors=True) as folder:
        stack = Stack(Path(folder), lease_seconds=15.0, allow_hub=False)
        try:
            exceeded = soak(stack, seconds)
        finally:
            stack.close()
    for bound in exceeded:
        print(f"EXCEEDED: {bound}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
