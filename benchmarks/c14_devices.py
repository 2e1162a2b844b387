"""C14.DEVICES: 5,000 short runs on one to four devices through two workers of four devices each.

The workers are those of `benchmarks.c14_worker_process`, each in a process of its own with a thread for each device:
its claims and the ends of its runs meet at every moment, and so do those of the other worker and the rounds of the
dispatcher. Each run must complete in its first attempt, and PostgreSQL may report no error: a transaction that it ends
for a deadlock is repeated, so only its log shows one.
"""

import random
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.c14_workers import (
    add_runs,
    end_fleet,
    read_number,
    start_process,
    wait_until_ended,
    wait_until_ready,
)
from tests.stack import Stack

RUNS, WORKERS, DEVICES = 5000, 2, 4
LEASE_SECONDS = 60.0
SECONDS_EACH = 2.0
"""Longest time for the runs, by run: then the benchmark ends with an error."""
OPTIONS = {"steps": 1, "step_seconds": 0.01, "log_lines_per_step": 0}


def main(scale: float = 1.0) -> bool:
    """Print counts and times; return True if all runs completed at once and PostgreSQL reported no error."""
    count, draw = max(WORKERS * DEVICES, round(RUNS * scale)), random.Random(1)
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder:
        service = Stack(Path(folder), lease_seconds=LEASE_SECONDS)
        fleet: list[subprocess.Popen[str]] = []
        try:
            fleet += [start_process(service, 1, slots=DEVICES) for _ in range(WORKERS)]
            wait_until_ready(fleet)
            add_runs(service, [draw.choice((1, 1, 2, 3, 4)) for _ in range(count)], OPTIONS)
            began = time.monotonic()
            wait_until_ended(service, count, timeout=SECONDS_EACH * count)
            took = time.monotonic() - began
            end_fleet(fleet)
            completed = read_number(service, "SELECT count(*) FROM runs WHERE status = 'completed' AND attempt = 1")
        finally:
            for process in fleet:
                process.kill()
                process.wait()
            service.close()
        log = (service.home / "logs" / "postgres.log").read_text()
    errors = [line for line in log.splitlines() if "ERROR:" in line or "PANIC:" in line]
    print(
        f"C14 {completed:,} of {count:,} runs on 1 to {DEVICES} devices completed in their first attempt within "
        f"{took:.0f} s, on {WORKERS} workers of {DEVICES} devices; PostgreSQL reported {len(errors)} errors",
        flush=True,
    )
    for line in errors[:10]:
        print(f"C14   {line}", flush=True)
    return completed == count and not errors
