"""C6: ten million log lines: ingest, the last hundred lines, and a hundred lines from the middle.

Anneal stores 2,000 lines per transaction, the maximum of a worker's writer, timed from the text of the line to the
return of the commit, after which they are readable. MLflow has no logs but artifacts: `log_artifact` of a local file
into a folder of the same disk, without fsync. A log that can be read while it grows is then one file that is logged
again at every flush, so that the cost of a flush grows with the log (timed at half the lines, the mean flush of the
whole log); or one file per flush, with constant cost, which leaves thousands of files that a reader has to join. Also
measured: logging the whole file once at the end.

Anneal's lines are read over HTTP: `/logs?tail=100`, and 100 lines of the event stream from the middle of the log.
MLflow's file is downloaded and cut; Ray's is the response of its job API. Neither has an offset.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import psycopg

from app.runs.events.log import NewEvent
from benchmarks.attempt import Attempt
from benchmarks.mlflow_peer import Mlflow, settings
from benchmarks.ratios import Lane, Ratio, Turns
from tests.stack import Stack
from tests.waiting import eventually

SIZES = (100_000, 1_000_000, 10_000_000)
FLUSH = 2000
SHOWN = 100
BLOCKS = 5
CALLS = 20
RAY_LINES = 1_000_000
_PARTS = 20
GOAL, GOAL_FLAT = 10.0, 1.2


def main(scale: float = 1.0) -> bool:
    """Print rates, times and ratios; return True if the goals are reached."""
    sizes = [max(FLUSH, int(size * scale)) for size in SIZES]
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder, ExitStack() as stack:
        home = Path(folder)
        service = Stack(home, lease_seconds=3600)
        stack.callback(service.close)
        mlflow = Mlflow(service)
        print("C6", settings(service, "log_artifact into a folder of the same disk"), flush=True)
        over = [_ingest(service, mlflow, home, size) for size in sizes]
        with psycopg.connect(service.settings.database_url or "", autocommit=True) as connection:
            connection.execute("VACUUM (ANALYZE) run_events")
        turns = Turns("C6", BLOCKS)
        turns.take({name: lane for one in over for name, lane in one.lanes.items()})
        ray = _ray(int(RAY_LINES * scale), stack)
    for name in turns.seconds:
        turns.show(name)
    if ray:
        print(ray)
    is_flat = True
    for what in ("tail", "seek"):
        for size in sizes[1:]:
            flat = turns.ratio(f"ours, {what}, {size:,}", f"ours, {what}, {sizes[0]:,}")
            is_flat = is_flat and flat.median <= GOAL_FLAT
            print(f"C6 {what}: {size:,} lines take {flat} times as long as {sizes[0]:,}; goal {GOAL_FLAT:g}")
    print(f"C6 goal of the ingest of {sizes[-1]:,} lines: {GOAL:g} times")
    return is_flat and over[-1].ratio.median >= GOAL


class Ingested:
    """Result of one size, and the reads to measure."""

    def __init__(self, ratio: Ratio, lanes: dict[str, Lane]) -> None:
        self.ratio = ratio
        self.lanes = lanes


def _line(number: int) -> str:
    return f"2026-01-02 03:04:05,678 INFO trainer: step {number:>10} loss 2.3145 grad_norm 0.8731 tokens/s 31250.4"


def _ingest(service: Stack, mlflow: Mlflow, home: Path, size: int) -> Ingested:
    attempt, run_id, file = Attempt(service.engine), mlflow.new_run(), home / f"train-{size}.log"
    _write(file, 0, size // 2)
    ours, theirs, parts = [], [], []
    for block in range(BLOCKS):
        ours.append(_store(attempt, size * block // BLOCKS, size * (block + 1) // BLOCKS))
        theirs.append(FLUSH / _logged(mlflow, run_id, file))
        parts.append(_in_parts(mlflow, run_id, home, size * block // BLOCKS))
    attempt.complete()
    _write(file, size // 2, size)
    once = size / _logged(mlflow, run_id, file)
    file.unlink()
    ratio = Ratio([one / other for one, other in zip(ours, theirs, strict=True)])
    of_parts = Ratio([one / other for one, other in zip(ours, parts, strict=True)])
    print(
        f"C6 {size:,} lines: ours stores {_spread(ours)} a second; MLflow {_spread(theirs)} in one file that can be "
        f"read while it grows, {_spread(parts)} in a file for each flush, {once:,.0f} all at once at their end\n"
        f"C6 {size:,} lines: ours stores {ratio} times as many a second as a growing artifact takes, {of_parts} times "
        "as many as an artifact for each flush",
        flush=True,
    )
    lanes = {
        f"ours, tail, {size:,}": Lane(_tail(service, attempt.run_id), CALLS, check=_are(size - SHOWN)),
        f"ours, seek, {size:,}": Lane(_seek(service, attempt.run_id, size // 2), CALLS, check=_are(size // 2)),
        f"MLflow, tail, {size:,}": Lane(_download(mlflow, run_id, file.name, None), 1, check=_are(size - SHOWN)),
        f"MLflow, seek, {size:,}": Lane(_download(mlflow, run_id, file.name, size // 2), 1, check=_are(size // 2)),
    }
    return Ingested(ratio, lanes)


def _store(attempt: Attempt, first: int, end: int) -> float:
    """Store lines and return the lines per second."""
    began = time.perf_counter()
    for start in range(first, end, FLUSH):
        now = time.time()
        lines = (_line(number) for number in range(start, min(start + FLUSH, end)))
        attempt.store(
            [NewEvent.from_payload("log", now, {"line": line, "stream": "stdout", "level": "info"}) for line in lines]
        )
    return (end - first) / (time.perf_counter() - began)


def _write(file: Path, first: int, end: int) -> None:
    with file.open("a") as log:
        log.writelines(_line(number) + "\n" for number in range(first, end))


def _logged(mlflow: Mlflow, run_id: str, file: Path) -> float:
    """Log the file as an artifact and return the seconds."""
    began = time.perf_counter()
    mlflow.client.log_artifact(run_id, str(file), "logs")
    return time.perf_counter() - began


def _in_parts(mlflow: Mlflow, run_id: str, home: Path, first: int) -> float:
    """Log one file per flush and return the lines per second."""
    took = 0.0
    for number in range(_PARTS):
        file = home / f"part-{first + number * FLUSH:010}.log"
        began = time.perf_counter()
        _write(file, first + number * FLUSH, first + (number + 1) * FLUSH)
        mlflow.client.log_artifact(run_id, str(file), "parts")
        took += time.perf_counter() - began
        file.unlink()
    return _PARTS * FLUSH / took


def _spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def _are(first: int) -> Callable[[list[str]], None]:
    def check(lines: list[str]) -> None:
        assert lines == [_line(number) for number in range(first, first + SHOWN)], lines[:2]

    return check


def _tail(service: Stack, run_id: str) -> Callable[[], list[str]]:
    def tail() -> list[str]:
        answer = service.client.get(f"/v1/runs/{run_id}/logs", params={"tail": SHOWN})
        return answer.text.splitlines()

    return tail


def _seek(service: Stack, run_id: str, line: int) -> Callable[[], list[str]]:
    # The status events of creation and claim precede the lines.
    query: dict[str, Any] = {"after": line + 2, "types": "log", "follow": "false", "format": "ndjson"}

    def seek() -> list[str]:
        with service.client.stream("GET", f"/v1/runs/{run_id}/events", params=query) as answer:
            assert answer.status_code == 200, answer.read()
            return [json.loads(one)["line"] for one in islice(answer.iter_lines(), SHOWN)]

    return seek


def _download(mlflow: Mlflow, run_id: str, name: str, line: int | None) -> Callable[[], list[str]]:
    def download() -> list[str]:
        # A local folder is read in place; any other store would be downloaded first.
        path = Path(mlflow.client.download_artifacts(run_id, f"logs/{name}"))
        with path.open() as file:
            if line is not None:
                return [one.rstrip("\n") for one in islice(file, line, line + SHOWN)]
            file.seek(max(0, os.fstat(file.fileno()).st_size - SHOWN * 200))
            return file.read().splitlines()[-SHOWN:]

    return download


def _ray(lines: int, stack: ExitStack) -> str:
    """Measure a Ray job that prints lines, read through the job API, which returns all lines or none."""
    import sys

    import ray
    from ray.job_submission import JobStatus, JobSubmissionClient

    from tests.ports import free_port

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets need a short path
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context: Any = ray.init(
        num_cpus=1, include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=free_port(), _temp_dir=folder,
        logging_level="error", log_to_driver=False,
    )  # fmt: skip
    stack.callback(ray.shutdown)
    client = JobSubmissionClient(f"http://{context.dashboard_url}")
    code = f"from benchmarks.c6_logs import _line; [print(_line(n)) for n in range({lines})]"
    job = client.submit_job(entrypoint=f"{sys.executable} -c '{code}'")
    over = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)
    eventually(lambda: client.get_job_status(job) in over, timeout=300)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        matches = [one for one in client.get_job_logs(job).splitlines() if "trainer: step" in one]
        middle = matches[lines // 2 : lines // 2 + SHOWN]
        took.append(time.perf_counter() - began)
        _are(lines // 2)(middle)
    return f"C6 Ray job logs, any hundred of {lines:,} lines: {min(took):.2f} to {max(took):.2f} s, since all are sent"
