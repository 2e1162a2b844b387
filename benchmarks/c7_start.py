"""C7: time from a request until an idle worker starts, against task queues with weaker guarantees.

Anneal is timed from before `POST /v1/runs` (which validates the run and commits it to PostgreSQL) until the worker's
thread has committed its claim and would start the training process. A peer is timed from before the call that sends the
task to the first line of the task's body. All share one Valkey as broker; each has one idle worker with one thread (RQ
forks a process per job, its default), and gets one task at a time.
"""

import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.stack import Stack
from tests.waiting import eventually

BLOCKS, BLOCK = 6, 20
JOBS = 5
STARTED = "c7:started"
BIN = Path(sys.executable).parent
SETTINGS = {
    "ours": "anneal worker, one slot: Celery's threads pool, durable in Postgres (fsync) before the answer",
    "celery": "threads pool of one, no results, prefetch 1, without gossip, mingle, heartbeat, events and control",
    "rq": "rq worker as it comes: a forked process for each job",
    "dramatiq": "one process, one thread, its default middleware",
    "ray task": "a remote function on a local cluster, its worker process warm",
    "ray job": "ray job submit: a Python process for each",
}


def main(scale: float = 1.0) -> bool:
    """Print medians and ratios; return True if Anneal starts within twice the time of bare Celery."""
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder, ExitStack() as stack:
        service = Stack(Path(folder), lease_seconds=60)
        stack.callback(service.close)
        os.environ["C7_REDIS_URL"] = service.settings.redis_url or ""
        lanes = _lanes(service, stack)
        submit = _ray_jobs(stack)
        took: dict[str, list[float]] = {name: [] for name in lanes}
        for name, start in lanes.items():
            start()  # warm up connections and caches
            print(f"C7 {name:9s} {SETTINGS[name]}", flush=True)
        for _ in range(max(round(BLOCKS * scale), 1)):
            for name, start in lanes.items():
                for _ in range(BLOCK):
                    time.sleep(random.uniform(0.02, 0.05))  # the worker waits again
                    took[name].append(start())
        print(f"C7 {'ray job':9s} {SETTINGS['ray job']}", flush=True)
        took["ray job"] = [submit() for _ in range(max(round(JOBS * scale), 1))]
    return _print(took)


def _lanes(service: Stack, stack: ExitStack) -> dict[str, Callable[[], float]]:
    """Return for each participant a function that sends a task and returns the seconds until it started."""
    from rq import Queue

    from benchmarks import c7_tasks

    client = service.redis()
    log = stack.enter_context((service.home / "c7.log").open("wb"))

    def run(command: list[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.terminate)  # killed, some would leave their own processes behind

    def timed(send: Callable[[str], str]) -> float:
        name = secrets.token_hex(8)
        began = time.monotonic()
        name = send(name)
        answer = client.blpop([STARTED], timeout=60)
        if answer is None:
            raise RuntimeError((service.home / "c7.log").read_text()[-3000:])
        who, when = answer[1].decode().split()
        assert who == name
        return float(when) - began

    run([sys.executable, "-m", "benchmarks.c7_worker"], service.settings.child_environment())
    eventually(lambda: service.client.get("/v1/workers").json()["data"], timeout=60)
    run(
        [str(BIN / "celery"), "-A", "benchmarks.c7_tasks:celery", "worker", "--pool=threads", "--concurrency=1",
         "--queues=c7-celery", "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=WARNING"],
        dict(os.environ),
    )  # fmt: skip
    run([str(BIN / "rq"), "worker", "--url", service.settings.redis_url or "", "--quiet", "c7-rq"], dict(os.environ))
    run(
        [str(BIN / "dramatiq"), "benchmarks.c7_tasks", "--processes=1", "--threads=1", "--queues=c7-dramatiq"],
        dict(os.environ),
    )
    queue = Queue("c7-rq", connection=c7_tasks.client)

    def rq(name: str) -> str:
        queue.enqueue(c7_tasks.body, name, result_ttl=0)
        return name

    def celery(name: str) -> str:
        c7_tasks.celery.send_task("c7.body", [name])
        return name

    def dramatiq(name: str) -> str:
        c7_tasks.dramatiq_body.send(name)
        return name

    return {
        "ours": lambda: timed(lambda _: service.create()),
        "celery": lambda: timed(celery),
        "rq": lambda: timed(rq),
        "dramatiq": lambda: timed(dramatiq),
        "ray task": _ray_tasks(stack),
    }


def _ray_tasks(stack: ExitStack) -> Callable[[], float]:
    """Start a local Ray cluster with one warm worker."""
    import ray

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets need a short path
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context: Any = ray.init(
        num_cpus=1, include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=free_port(), _temp_dir=folder,
        logging_level="error", log_to_driver=False,
    )  # fmt: skip
    stack.callback(ray.shutdown)
    os.environ["C7_RAY_URL"] = f"http://{context.dashboard_url}"

    @ray.remote
    def body() -> float:
        return time.monotonic()

    def start() -> float:
        began = time.monotonic()
        when: float = ray.get(body.remote())
        return when - began

    return start


def _ray_jobs(stack: ExitStack) -> Callable[[], float]:
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(os.environ["C7_RAY_URL"])
    over = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)

    def submit() -> float:
        began = time.monotonic()
        job = client.submit_job(entrypoint=f"{sys.executable} -c 'import time; print(time.monotonic())'")
        eventually(lambda: client.get_job_status(job) in over, timeout=120)
        return float(client.get_job_logs(job).split()[-1]) - began

    return submit


def _print(took: dict[str, list[float]]) -> bool:
    for name, seconds in took.items():
        ordered = sorted(1e3 * one for one in seconds)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        print(
            f"C7 {name:9s} p50 {statistics.median(ordered):8.2f} ms  p99 {p99:8.2f} ms  min {ordered[0]:8.2f}  "
            f"max {ordered[-1]:8.2f}  of {len(ordered)}"
        )
    blocks = [
        statistics.median(took["ours"][at : at + BLOCK]) / statistics.median(took["celery"][at : at + BLOCK])
        for at in range(0, len(took["ours"]), BLOCK)
    ]
    ratio = statistics.median(took["ours"]) / statistics.median(took["celery"])
    print(f"C7 ours takes {ratio:.2f} times as long as bare Celery (blocks: {min(blocks):.2f} to {max(blocks):.2f})")
    return ratio <= 2
