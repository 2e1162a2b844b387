"""C5: events of a run streamed to 1,000 subscribers, against one XREAD per subscriber with sse-starlette.

Both serve the same events to the same readers from one uvicorn process (uvloop, httptools). The measure is the CPU time
of that process per delivered event; the readers and the databases run on the same machine and are not counted. Events
are inserted one per transaction (Anneal: PostgreSQL, then the notification; peer: XADD), and latency is measured from
just before the insertion until a subscriber has the event's last byte. After the measurement, some subscribers
disconnect at random and reconnect with `Last-Event-ID` while events continue; every id must arrive exactly once.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from app.infra.broker import events_channel
from app.runs.events.log import NewEvent, append_events
from benchmarks.figures import quantile
from benchmarks.stream_readers import ReaderGroup
from tests.ports import free_port
from tests.rows import add_run, add_worker, claim
from tests.stack import Stack
from tests.waiting import eventually

PROCESSES = 2
ROUNDS = 3
RECONNECTING = 0.1
HANGING_SECONDS = 3.0
LATEST = 10.0
"""Seconds after the last event within which every subscriber must have it."""
TICK = 0.01
MOST_SEQ = 20_000
PEER_SETTINGS = (
    "uvicorn with uvloop and httptools, one process", "redis-py's asyncio client with hiredis",
    "XREAD BLOCK 5000 COUNT 100 on a connection of its own for each subscriber", "sse-starlette as it comes",
)  # fmt: skip
METRIC = {
    "step": 10, "epoch": 0.5, "loss": 2.31, "learning_rate": 0.0002, "grad_norm": 0.9, "gpu_memory_mb": None,
    "samples_per_second": 12.5, "extra": {"tokens_per_second": 3120.5},
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Number of subscribers and events per second."""

    subscribers: int
    rate: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.subscribers:,} × {self.rate:,}/s"

    def scaled(self, scale: float) -> "Load":
        """Return the same rate with a part of the subscribers and of the time."""
        return Load(max(round(self.subscribers * scale), 2), self.rate, max(self.seconds * scale, 1.0))


LIGHT = Load(100, 100, 8.0)
"""Load that the peer can serve without lag; only there do both do the same work."""
HEAVY = Load(1000, 100, 8.0)
FULL = Load(1000, 1000, 4.0)


def main(scale: float = 1.0) -> bool:
    """Print medians and ratios; return True if the goals are reached."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder, ExitStack() as stack:
        service = Stack(Path(folder), lease_seconds=3600, streams_per_key=2000)
        stack.callback(service.close)
        peer = stack.enter_context(_peer(service))
        light, heavy, full = (load.scaled(scale) for load in (LIGHT, HEAVY, FULL))
        ours: dict[Load, list[Figures]] = {light: [], heavy: [], full: []}
        theirs: dict[Load, list[Figures]] = {light: [], heavy: []}
        for load in (light, heavy):
            for _ in range(max(round(ROUNDS * scale), 1)):
                ours[load].append(_measure(Ours(service), load, RECONNECTING))
                print(f"C5   {load}  ours  {ours[load][-1]}", flush=True)
                theirs[load].append(_measure(Peer(service, peer), load, 0.0))
                print(f"C5   {load}  peer  {theirs[load][-1]}", flush=True)
        ours[full] = [_measure(Ours(service), full, 0.0) for _ in range(max(round(2 * scale), 1))]
        print("C5   peer: ", ", ".join(PEER_SETTINGS), sep="")
    return _print(ours, theirs)


@dataclass(frozen=True)
class Figures:
    """Result of one round."""

    events: int
    cpu: float
    seconds: float
    latencies: list[float]
    wrong: int
    reconnects: int
    missing: int
    problem: str

    @property
    def cpu_us(self) -> float:
        """Microseconds of server CPU per delivered event."""
        return self.cpu / self.events * 1e6

    def percentile(self, part: float) -> float:
        """Return a latency quantile in milliseconds."""
        return quantile(self.latencies, part) * 1e3

    def __str__(self) -> str:
        return (
            f"{self.cpu_us:6.2f} µs CPU per event, {self.events / self.seconds:8,.0f} events/s delivered, "
            f"{self.cpu / self.seconds:4.2f} cores, p50 {self.percentile(0.5):7.1f} ms, "
            f"p99 {self.percentile(0.99):7.1f} ms, {self.reconnects} reconnected, wrong {self.wrong} {self.problem}"
        )


class Ours:
    """Run in the database, written as a worker does."""

    headers = ""

    def __init__(self, service: Stack) -> None:
        self._service = service
        self._redis = service.redis()
        self.run_id: str = add_run(service.engine).id
        claim(service.engine, add_worker(service.engine), lease=3600)
        self.after = 2  # two status events
        self._written = 0
        self.port = service.api.port
        self.path = f"/v1/runs/{self.run_id}/events"
        self.headers = f"Authorization: Bearer {service.api.key}\r\n"
        self.process = psutil.Process(service.api.process.pid)

    def write(self, count: int) -> None:
        """Insert events in one transaction, then notify."""
        now = time.time()
        new = [NewEvent.from_payload("metric", now, METRIC) for _ in range(count)]
        with self._service.engine.begin() as connection:
            append_events(connection, self.run_id, 1, self._written + 1, new)
        self._written += count
        self._redis.publish(events_channel(self.run_id), "")


class Peer:
    """Redis stream with the same ids as Anneal's, so that the same readers can check them."""

    headers = ""

    def __init__(self, service: Stack, server: "Server") -> None:
        self._redis = service.redis()
        self.run_id = f"run_{time.monotonic_ns():026d}"
        self.after = 0
        self._written = 0
        self.port = server.port
        self.path = f"/streams/{self.run_id}"
        self.process = psutil.Process(server.pid)

    def write(self, count: int) -> None:
        """Send one XADD per event, in one pipeline."""
        pipeline = self._redis.pipeline(transaction=False)
        for _ in range(count):
            self._written += 1
            head = {"run_id": self.run_id, "seq": self._written, "ts": "2026-01-02T03:04:05.678Z"}
            data = json.dumps({**head, **METRIC}, separators=(",", ":"))
            pipeline.xadd(self.run_id, {"type": "metric", "data": data}, id=f"{self._written}-0", maxlen=MOST_SEQ)
        pipeline.execute()


@dataclass(frozen=True)
class Server:
    """Port and process id of the peer."""

    port: int
    pid: int


@contextmanager
def _peer(service: Stack) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "benchmarks.c5_peer:api", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "PEER_REDIS_URL": service.settings.redis_url or ""}
    # It logs errors when readers disconnect during a blocking read.
    log = (service.home / "peer.log").open("wb")
    with log, subprocess.Popen([*command, "--log-level", "warning"], env=environment, stderr=log) as process:
        try:
            eventually(lambda: _answers(port), what="the peer answers")
            yield Server(port, process.pid)
        finally:
            process.kill()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _measure(lane: Ours | Peer, load: Load, reconnecting: float) -> Figures:
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder:
        group = ReaderGroup(
            Path(folder), load.subscribers, PROCESSES, ports=[lane.port], paths=[lane.path], headers=lane.headers,
            after=lane.after, most=MOST_SEQ,
        )  # fmt: skip
        began, cpu_before = time.monotonic(), sum(lane.process.cpu_times()[:2])
        stamps = _produce(lane, load.rate, load.seconds)
        # A side that keeps up needs no more time; one that does not is measured under full load up to here.
        reports = group.until_all(lane.after + len(stamps), time.monotonic() + 3.0)
        took, cpu = time.monotonic() - began, sum(lane.process.cpu_times()[:2]) - cpu_before
        received = sum(report["received"] for report in reports)
        written = len(stamps)
        if reconnecting:
            group.ask(f"hang {HANGING_SECONDS} {reconnecting}")
            written += len(_produce(lane, load.rate, HANGING_SECONDS))
            reports = group.until_all(lane.after + written, time.monotonic() + LATEST)
        samples = group.end()
    came = [
        when - stamps[seq - lane.after - 1]
        for _, first, last, when in samples
        for seq in range(first, min(last, lane.after + len(stamps)) + 1)
    ]
    return Figures(
        events=received,
        cpu=cpu,
        seconds=took,
        latencies=sorted(came),
        wrong=sum(report["wrong"] for report in reports),
        reconnects=sum(report["reconnects"] for report in reports),
        missing=load.subscribers * written - sum(report["received"] for report in reports),
        problem=next((report["problem"] for report in reports if report["problem"]), ""),
    )


def _produce(lane: Ours | Peer, rate: int, seconds: float) -> list[float]:
    """Insert events at a constant rate; return the time just before each insertion."""
    stamps: list[float] = []
    began = time.monotonic()
    for tick in range(int(seconds / TICK)):
        time.sleep(max(0.0, began + tick * TICK - time.monotonic()))
        count = int((tick + 1) * TICK * rate + 1e-6) - len(stamps)
        if count:
            stamps += [time.monotonic()] * count
            lane.write(count)
    return stamps


def _print(ours: dict[Load, list[Figures]], theirs: dict[Load, list[Figures]]) -> bool:
    ratios = {}
    for load, own in ours.items():
        _summary(f"ours, {load}", own)
        if load in theirs:
            _summary(f"peer, {load}", theirs[load])
            ratios[load] = [peer.cpu_us / one.cpu_us for one, peer in zip(own, theirs[load], strict=True)]
    for load, of_rounds in ratios.items():
        behind = sum(one.missing for one in theirs[load])
        print(
            f"C5 {load}: ours takes {statistics.median(of_rounds):.1f} times less CPU per event "
            f"({min(of_rounds):.1f} to {max(of_rounds):.1f}); the peer "
            + (f"falls behind, so its reads are large and cheap: {behind:,} events late" if behind else "keeps up")
        )
    light, heavy, full = ours
    per_core = 1e6 / statistics.median(one.cpu_us for one in ours[full])
    p99 = statistics.median(one.percentile(0.99) for one in ours[heavy])
    lost = sum(one.wrong + one.missing for rounds in ours.values() for one in rounds)
    return statistics.median(ratios[light]) >= 6 and per_core >= 100_000 and p99 < 100 and lost == 0


def _summary(name: str, rounds: list[Figures]) -> None:
    cost = sorted(one.cpu_us for one in rounds)
    worst = max(one.percentile(0.99) for one in rounds)
    print(
        f"C5 {name:20s} CPU per event: median {statistics.median(cost):6.2f} µs  min {cost[0]:6.2f}  "
        f"max {cost[-1]:6.2f}; a core delivers {1e6 / statistics.median(cost):9,.0f}/s; p50 "
        f"{statistics.median(one.percentile(0.5) for one in rounds):7.1f} ms, p99 "
        f"{statistics.median(one.percentile(0.99) for one in rounds):7.1f} ms (worst round {worst:.1f}); "
        f"{sum(one.reconnects for one in rounds)} reconnects, {sum(one.wrong for one in rounds)} ids wrong, "
        f"{sum(one.missing for one in rounds)} not there at the end"
    )
