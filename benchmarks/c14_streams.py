"""C14.STREAMS: 10^4 readers of the events of many runs, through nginx from four API processes, of which one is killed.

Each reader follows one of 100 runs, which have events at a modest rate, each inserted in a transaction of its own.
Latency is measured from just before the insertion until a reader has the event's last byte. Then one API process is
killed with SIGKILL while events continue: the readers that it served reconnect at once, with `Last-Event-ID`. Every
reader checks that each id arrives exactly once. Without nginx, the readers take turns in the use of the four processes.
"""

import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil

from app.infra.broker import events_channel
from app.runs.events.log import NewEvent, append_events
from benchmarks import svg
from benchmarks.figures import quantile, seconds_used
from benchmarks.stream_readers import ReaderGroup
from tests.ports import free_port
from tests.rows import add_run, add_worker, claim
from tests.server import ProcessServer
from tests.stack import Stack
from tests.waiting import eventually

APIS, PROCESSES = 4, 2
READERS, RUNS = 10_000, 100
RATE = 50
"""Events per second, of all runs together."""
SECONDS, SECONDS_AFTER = 30.0, 20.0
LATEST = 60.0
SPARE_FILES = 500
MOST_SEQ = 20_000
AFTER = 2
"""Events of a run's creation and claim."""
METRIC = {"step": 10, "epoch": 0.5, "loss": 2.31, "learning_rate": 0.0002, "grad_norm": 0.9, "gpu_memory_mb": None,
          "samples_per_second": 12.5, "extra": {"tokens_per_second": 3120.5}}  # fmt: skip


def main(scale: float = 1.0) -> bool:
    """Print memory, latencies and the time of the reconnection; return True if nothing was lost or duplicated."""
    proxy = shutil.which("nginx")
    readers = _readers(max(APIS * PROCESSES, round(READERS * scale)), proxy is not None)
    runs = max(1, round(RUNS * scale))
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        service = Stack(folder, lease_seconds=3600, streams_per_key=2 * READERS)
        stack.callback(service.close)
        apis = [service.api]
        for _ in range(APIS - 1):
            apis.append(ProcessServer(service.settings))
            apis[-1].start()
            stack.callback(apis[-1].stop)
            stack.callback(apis[-1].client.close)
        for api in apis:
            eventually(api._answers, timeout=120, what="every API process answers")
        nginx = stack.enter_context(_nginx(proxy, folder, [api.port for api in apis])) if proxy else None
        ports = [nginx.port] if nginx else [api.port for api in apis]
        print(
            f"C14 {APIS} API processes behind {_version(proxy) if proxy else 'no proxy, as nginx is not installed'}",
            flush=True,
        )
        return _Measurement(service, apis, nginx).run(folder, readers, runs, ports)


class _Nginx:
    def __init__(self, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.port = port
        self.process = process


class _Measurement:
    def __init__(self, service: Stack, apis: list[ProcessServer], nginx: _Nginx | None) -> None:
        self._service = service
        self._apis = apis
        self._nginx = nginx
        self._redis = service.redis()
        self._runs: list[str] = []
        self._stored: list[int] = []
        self._stamps: list[list[float]] = []
        self._began = 0.0

    def run(self, folder: Path, readers: int, runs: int, ports: list[int]) -> bool:
        self._add_runs(runs)
        before, proxy_before = [_memory(api.process.pid) for api in self._apis], self._proxy_memory()
        began = time.monotonic()
        group = ReaderGroup(
            folder, readers, PROCESSES, ports=ports, paths=[f"/v1/runs/{run_id}/events" for run_id in self._runs],
            headers=f"Authorization: Bearer {self._service.api.key}\r\n", after=AFTER, most=MOST_SEQ,
            # nginx divides a body into chunks of its own; without chunks the readers need not join them.
            version="1.0" if self._nginx else "1.1",
        )  # fmt: skip
        took = time.monotonic() - began
        of_streams = [_memory(api.process.pid) - used for api, used in zip(self._apis, before, strict=True)]
        print(
            f"C14 {readers:,} readers of {runs} runs connected in {took:.1f} s ({readers / took:,.0f} a second); an "
            f"API process uses {sum(of_streams) / readers / 1024:.1f} KiB a stream ({min(before) / 2**20:.0f} MiB "
            f"without, {max(map(sum, zip(before, of_streams, strict=True))) / 2**20:.0f} MiB with), the proxy "
            f"{(self._proxy_memory() - proxy_before) / readers / 1024:.1f} KiB",
            flush=True,
        )
        idle = self._cpu()
        time.sleep(10)
        print(f"C14 without events: {self._cores(idle, 10)}", flush=True)
        idle, began = self._cpu(), time.monotonic()
        self._produce(SECONDS)
        seconds = time.monotonic() - began
        delivered = sum(report["received"] for report in group.ask("count"))
        print(
            f"C14 {RATE} events a second: {delivered / seconds:,.0f} deliveries a second, {self._cores(idle, seconds)}",
            flush=True,
        )
        # Not with the events that make all runs equally long, which come at once.
        measured = [len(stamps) for stamps in self._stamps]
        self._level(group)
        killed_at = time.monotonic()
        self._apis[-1].kill()
        self._produce(SECONDS_AFTER)
        reports = self._level(group)
        samples = group.end()
        latencies = sorted(
            when - self._stamps[path][seq - AFTER - 1]
            for path, first, last, when in samples
            for seq in range(first, min(last, AFTER + measured[path]) + 1)
        )
        cuts, wrong = sum(report["cuts"] for report in reports), sum(report["wrong"] for report in reports)
        expected = sum(
            len(self._stamps[path]) * len(range(path, readers, runs)) for path in range(runs)
        )  # reader n follows run n modulo their number
        received = sum(report["received"] for report in reports)
        back = [moment - killed_at for moment in group.reopened]
        print(
            f"C14 latency of {len(latencies):,} deliveries: p50 {quantile(latencies, 0.5) * 1e3:.0f} ms, p99 "
            f"{quantile(latencies, 0.99) * 1e3:.0f} ms, longest {latencies[-1] * 1e3:.0f} ms\n"
            f"C14 one of {APIS} API processes killed: {cuts:,} streams cut; of these half were back after "
            f"{quantile(back, 0.5):.1f} s, 99 % after {quantile(back, 0.99):.1f} s, all after {back[-1]:.1f} s, with "
            f"{sum(report['refused'] for report in reports):,} attempts refused\n"
            f"C14 {received:,} of {expected:,} events delivered, {wrong} out of order or more than once "
            f"{next((report['problem'] for report in reports if report['problem']), '')}",
            flush=True,
        )
        line = [(moment, 100 * (n + 1) / len(back)) for n, moment in enumerate(back)]
        line = [*line[:: max(1, len(line) // 200)], line[-1]]
        path = svg.line_chart(
            "scale-streams.svg", f"Streams that are back after one of {APIS} API processes was killed",
            ("seconds since SIGKILL", "percent"), {f"{cuts:,} of {readers:,} streams": [(0, 0), *line]}, (False, False),
        )  # fmt: skip
        print(f"C14 chart: {path}")
        return received == expected and not wrong and len(back) >= cuts

    def _add_runs(self, count: int) -> None:
        worker = add_worker(self._service.engine, devices=count)
        self._runs = [add_run(self._service.engine).id for _ in range(count)]
        for _ in range(count):
            # The dispatcher holds locks of the runs for which it is just sending hints, and a claim skips those.
            eventually(lambda: claim(self._service.engine, worker, lease=3600), what="a run is claimed")
        self._stamps = [[] for _ in range(count)]

    def _produce(self, seconds: float) -> None:
        """Insert events of runs at random at a constant rate, and keep the time before each insertion."""
        began = time.monotonic()
        for number in range(int(seconds * RATE)):
            time.sleep(max(0.0, began + number / RATE - time.monotonic()))
            place = random.randrange(len(self._runs))
            self._stamps[place].append(time.monotonic())
            with self._service.engine.begin() as connection:
                append_events(
                    connection,
                    self._runs[place],
                    1,
                    len(self._stamps[place]),
                    [NewEvent.from_payload("metric", time.time(), METRIC)],
                )
            self._redis.publish(events_channel(self._runs[place]), "")

    def _level(self, group: ReaderGroup) -> list[dict[str, int]]:
        """Make all runs equally long, and wait until every reader has all events; return the reports."""
        most = max(map(len, self._stamps))
        for run_id, stamps in zip(self._runs, self._stamps, strict=True):
            missing = most - len(stamps)
            if missing:
                first = len(stamps) + 1
                stamps.extend([time.monotonic()] * missing)
                with self._service.engine.begin() as connection:
                    append_events(
                        connection, run_id, 1, first, [NewEvent.from_payload("metric", time.time(), METRIC)] * missing
                    )
                self._redis.publish(events_channel(run_id), "")
        return group.until_all(AFTER + most, time.monotonic() + LATEST)

    def _cpu(self) -> dict[str, float]:
        postgres, valkey = self._service.servers.postgres, self._service.servers.valkey
        assert postgres and postgres.process and valkey and valkey.process
        return {
            "API": sum(seconds_used(api.process.pid) for api in self._apis),
            "proxy": seconds_used(self._nginx.process.pid) if self._nginx else 0.0,
            "PostgreSQL": seconds_used(postgres.process.pid),
            "Valkey": seconds_used(valkey.process.pid),
        }

    def _cores(self, before: dict[str, float], seconds: float) -> str:
        now = self._cpu()
        return ", ".join(f"{name} {(now[name] - before[name]) / seconds:.2f} cores" for name in now)

    def _proxy_memory(self) -> int:
        if self._nginx is None:
            return 0
        process = psutil.Process(self._nginx.process.pid)
        return sum(_memory(one.pid) for one in (process, *process.children()))


def _memory(pid: int) -> int:
    """Return the memory of a process that it shares with no other one."""
    return int(psutil.Process(pid).memory_full_info().uss)


def _readers(reader_count: int, is_proxied: bool) -> int:
    """Raise the limit of open files, and return how many readers it allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A process of readers has a socket for each, an nginx process two, as each has half of the streams.
    each = 2 / PROCESSES if is_proxied else 1 / PROCESSES
    possible = int((hard - SPARE_FILES) / each)
    if possible < reader_count:
        print(
            f"C14 {reader_count:,} readers need {int(reader_count * each) + SPARE_FILES:,} open files in a process, "
            f"the limit is {hard:,}: {possible:,} readers. Raise it: `ulimit -Hn`, LimitNOFILE= of systemd, "
            "ulimits of a container"
        )
    return min(reader_count, possible) // PROCESSES * PROCESSES


def _version(proxy: str | None) -> str:
    result = subprocess.run([proxy or "", "-v"], capture_output=True, text=True, check=True)
    return result.stderr.strip().rpartition(" ")[2]


@contextmanager
def _nginx(program: str, folder: Path, ports: list[int]) -> Iterator[_Nginx]:
    """Run nginx as a process of its own, as docs/operations/scale.md configures it."""
    port = free_port()
    home = folder / "nginx"
    home.mkdir()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    servers = "".join(f"server 127.0.0.1:{one} max_fails=1 fail_timeout=5s; " for one in ports)
    folders = "".join(
        f"{kind}_temp_path {home}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (home / "nginx.conf").write_text(f"""
        {"user root;" if os.geteuid() == 0 else ""} daemon off; pid {home}/pid; error_log {home}/error.log error;
        worker_processes {PROCESSES}; worker_rlimit_nofile {hard};
        events {{ worker_connections {hard - 100}; }}
        http {{
            access_log off; {folders}
            upstream anneal {{ zone anneal 64k; least_conn; {servers} }}
            server {{
                listen 127.0.0.1:{port} backlog=4096 reuseport;
                location / {{
                    proxy_pass http://anneal; proxy_set_header Host $http_host; proxy_http_version 1.1;
                    proxy_set_header Connection ""; proxy_buffering off; proxy_request_buffering off;
                    proxy_read_timeout 1h;
                }}
            }}
        }}""")
    with subprocess.Popen([program, "-p", str(home), "-c", str(home / "nginx.conf")]) as process:
        try:
            eventually(lambda: _answers(port), what="nginx answers")
            yield _Nginx(port, process)
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
