"""C14.WORKERS: 200 workers of one device, and a queue of some thousand short runs.

The workers are those of `benchmarks.c14_worker_process`: 50 in a process, each with the real code of a worker, except
that Celery's program is replaced by a thread that takes hints, and a training process by a thread of the fake trainer.
They register and send heartbeats. Then all runs become pending at once, inserted into the database; API and dispatcher
notify the workers as ever. When the queue is empty, further runs are created over HTTP, fewer than the workers can
take, and the time from the creation to the claim is measured. At the end no lease and no run may have been lost.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import text

from app.infra.ids import new_id
from app.runs.state import machine
from app.standalone.postgres import Postgres
from benchmarks.figures import quantile, seconds_used
from tests.rows import add_run
from tests.stack import Stack
from tests.waiting import eventually

WORKERS, PROCESSES = 200, 4
RUNS, ARRIVING = 1000, 100
ARRIVALS = 5.0
"""Runs created per second once the queue is empty."""
STEPS, STEP_SECONDS = 10, 3.0
IDLE_SECONDS = 10.0
CONNECTIONS_EACH = 4
"""Upper bound of the connections to PostgreSQL that a worker with one slot keeps."""
LEASE_SECONDS = 60.0
OPTIONS = {"steps": STEPS, "step_seconds": STEP_SECONDS, "log_lines_per_step": 0}


def main(scale: float = 1.0) -> bool:
    """Print rates, waits and load; return True if nothing was lost."""
    workers, runs = max(PROCESSES, round(WORKERS * scale)), max(PROCESSES, round(RUNS * scale))
    Postgres.max_connections = 200 + CONNECTIONS_EACH * workers
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder:
        service = Stack(Path(folder), lease_seconds=LEASE_SECONDS)
        fleet: list[subprocess.Popen[str]] = []
        try:
            return _measure(service, fleet, workers // PROCESSES * PROCESSES, runs, max(5, round(ARRIVING * scale)))
        finally:
            for process in fleet:
                process.kill()
                process.wait()
            service.close()


def _measure(service: Stack, fleet: "list[subprocess.Popen[str]]", workers: int, runs: int, arriving: int) -> bool:
    began = time.monotonic()
    fleet += [start_process(service, workers // PROCESSES) for _ in range(PROCESSES)]
    wait_until_ready(fleet)
    online = read_number(service, "SELECT count(*) FROM workers WHERE state = 'online'")
    took = time.monotonic() - began
    before = seconds_used(_postgres(service))
    time.sleep(IDLE_SECONDS)
    used = seconds_used(_postgres(service)) - before
    connections = read_number(service, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
    print(
        f"C14 {online} workers of {PROCESSES} processes registered within {took:.1f} s of their start; idle, they use "
        f"{used / IDLE_SECONDS:.3f} cores of PostgreSQL and {connections} connections",
        flush=True,
    )
    rates = _queue(service, runs)
    waits = _arrive(service, arriving)
    figures = end_fleet(fleet)
    lost = read_number(service, "SELECT count(*) FROM run_attempts WHERE outcome <> 'completed' OR outcome IS NULL")
    completed = read_number(service, "SELECT count(*) FROM runs WHERE status = 'completed' AND attempt = 1")
    gaps = read_number(
        service,
        "SELECT count(*) FROM (SELECT run_id FROM run_events GROUP BY run_id "
        "HAVING count(*) <> max(seq) OR count(*) FILTER (WHERE type = 'metric') <> "
        f"{STEPS}) AS gaps JOIN runs ON runs.id = run_id WHERE status = 'completed'",
    )
    claims = sorted(seconds for one in figures for seconds in one["claims"])
    silences = sorted(seconds for one in figures for seconds in one["silences"])
    overdue = [run_id for one in figures for run_id in one["overdue"]]
    print(
        f"C14 {rates}\n"
        f"C14 a claim takes {quantile(claims, 0.5) * 1e3:.0f} ms in the median, p99 "
        f"{quantile(claims, 0.99) * 1e3:.0f} ms; a run of {arriving} created over HTTP at {ARRIVALS:g} a second was "
        f"claimed after {quantile(waits, 0.5) * 1e3:.0f} ms in the median, p99 {quantile(waits, 0.99) * 1e3:.0f} ms, "
        f"longest {waits[-1] * 1e3:.0f} ms\n"
        f"C14 {completed} of {runs + arriving} runs completed in their first attempt, {lost} attempts lost, {gaps} "
        f"runs with missing events; the longest time between two renewals was {silences[-1]:.1f} s of "
        f"{LEASE_SECONDS:g} s, trainers beyond their deadline: {len(overdue)}",
        flush=True,
    )
    return completed == runs + arriving and not lost and not gaps and not overdue


def start_process(service: Stack, workers: int, **values: Any) -> "subprocess.Popen[str]":
    """Start a process with workers; `values` are settings of theirs."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.c14_worker_process", str(workers)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=service.settings.model_copy(update=values).child_environment(),
    )  # fmt: skip


def wait_until_ready(fleet: "Sequence[subprocess.Popen[str]]") -> None:
    """Wait until all workers are registered."""
    for process in fleet:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"


def _queue(service: Stack, count: int) -> str:
    """Let the workers train a queue of runs; return its figures as a sentence."""
    add_runs(service, [1] * count, OPTIONS)
    postgres, valkey = _postgres(service), service.servers.valkey
    assert valkey is not None
    assert valkey.process is not None
    pids = {"PostgreSQL": postgres, "the API": service.api.process.pid, "Valkey": valkey.process.pid}
    before = {name: seconds_used(pid) for name, pid in pids.items()}
    began = time.monotonic()
    wait_until_ended(service, count, timeout=300)
    took = time.monotonic() - began
    load = ", ".join(f"{name} {(seconds_used(pid) - before[name]) / took:.2f}" for name, pid in pids.items())
    with service.engine.connect() as connection:
        at = connection.scalars(
            text("SELECT extract(epoch FROM started_at - min(started_at) OVER ()) FROM run_attempts ORDER BY 1")
        ).all()
    online = read_number(service, "SELECT count(*) FROM workers")
    first = float(at[min(len(at), online) - 1])
    rate = len(at) / float(at[-1]) if at[-1] else 0.0
    busy = len(at) * STEPS * STEP_SECONDS / (online * took)
    return (
        f"{count:,} runs of {STEPS * STEP_SECONDS:g} s took {took:.0f} s: {rate:.1f} claims a second, devices in use "
        f"{busy:.2f}; all workers had their first run within {first:.1f} s. Cores in use: {load}"
    )


def add_runs(service: Stack, devices: Sequence[int], options: dict[str, Any]) -> None:
    """Insert a pending run for each number of devices, with these options of the fake trainer."""
    model = add_run(service.engine, backend="celery")
    with service.engine.begin() as connection:
        connection.execute(text("DELETE FROM runs WHERE id = :id"), {"id": model.id})
        for number, needed in enumerate(devices):
            values = {
                "id": new_id("run"), "name": f"run {number}", "backend": "fake", "user_set_fields": [],
                "experiment_id": model.experiment_id, "dataset_id": service.dataset_id, "devices_needed": needed,
                "config": {"base_model": "none", "method": "sft", "logging_steps": 1, "extra": options},
            }  # fmt: skip
            connection.execute(machine.create(values))


def _arrive(service: Stack, count: int) -> list[float]:
    """Create runs at a constant rate over HTTP; return the seconds from the creation of each to its claim."""
    began = time.monotonic()
    ids = []
    for number in range(count):
        time.sleep(max(0.0, began + number / ARRIVALS - time.monotonic()))
        ids.append(service.create(OPTIONS, {"logging_steps": 1}))
    for run_id in ids:
        service.until(run_id, "completed", timeout=120)
    with service.engine.connect() as connection:
        query = text(
            "SELECT extract(epoch FROM run_attempts.started_at - created_at) FROM runs "
            "JOIN run_attempts ON run_id = id "
            "WHERE id = ANY(:ids) ORDER BY 1"
        )
        return [float(seconds) for seconds in connection.scalars(query, {"ids": ids})]


def wait_until_ended(service: Stack, count: int, timeout: float) -> None:
    """Wait until so many runs have ended."""
    query = "SELECT count(*) FROM runs WHERE status IN ('completed', 'failed', 'cancelled')"
    eventually(lambda: read_number(service, query) == count, timeout=timeout, every=1.0, what="the queue is empty")


def end_fleet(fleet: "Sequence[subprocess.Popen[str]]") -> list[dict[str, Any]]:
    """Let the processes end; return the figures of each."""
    results = []
    for process in fleet:
        output, _ = process.communicate("", timeout=60)
        results.append(json.loads(output.splitlines()[-1]))
    return results


def _postgres(service: Stack) -> int:
    postgres = service.servers.postgres
    assert postgres is not None
    assert postgres.process is not None
    return postgres.process.pid


def read_number(service: Stack, query: str) -> int:
    """Return the number that a query selects."""
    with service.engine.connect() as connection:
        return int(connection.scalar(text(query)) or 0)
