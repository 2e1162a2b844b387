"""Many workers in one process, for C14: the code of the worker, except that a trainer is a thread.

`python -m benchmarks.c14_worker_process COUNT` registers that many workers, prints `ready`, and follows hints until
standard input is closed; then it prints figures as JSON. Each worker has its own context as `worker.main` creates it:
connections, heartbeat, listeners, leases, writers, and the supervision of its run. A thread per device takes hints from
the list of Redis that Celery uses, instead of a Celery process. The fake trainer runs in a thread of this process, with
the channel of a training process.
"""

import json
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from anneal.contracts.attempt.device import AssignedDevice
from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.attempt.messages import ControlMessage
from app.config import Settings, get_settings
from app.infra.broker import QUEUE
from app.infra.clock import since_boot
from app.infra.process.identity import ProcessIdentity
from worker.attempts import memory_watch, supervisor
from worker.context import WorkerContext
from worker.fake.trainer import FakeTrainer
from worker.lease import Lease
from worker.process.channel import Channel
from worker.process.launcher import Launcher
from worker.process.training_process import Exit, TrainingProcess
from worker.service import WorkerService
from worker.wire.control import Control
from worker.wire.journal import Journal
from worker.wire.rank_place import RankPlace
from worker.wire.reporter import Reporter

claims: list[float] = []
"""Seconds of each claim that took a run."""
silences: list[float] = []
"""Longest time without a renewal, of each lease."""
overdue: list[str] = []
"""Runs whose trainer was still working after its deadline."""


class TrainerEnd:
    """Source of the exit of a trainer in a thread."""

    launched = "cold"

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._exit: Exit | None = None

    def set(self, exit: Exit) -> None:
        """Report the exit."""
        self._exit = exit
        os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        return self._event

    def poll_exit(self) -> Exit | None:
        return self._exit

    def close(self) -> None:
        os.close(self._event)


class TrainerThread(TrainingProcess):
    """A fake trainer in a thread, which the supervisor holds like a process."""

    def __init__(self, job_path: Path, deadline: float, rank: int) -> None:
        self.identity = ProcessIdentity.of_this_process()
        self.channel = Channel()
        self.fate: Any = TrainerEnd()
        self._control = Control()
        self._deadline = deadline
        self._exit: Exit | None = None
        self._rank = rank
        self._thread = threading.Thread(target=self._train, args=(job_path,), name="trainer", daemon=True)
        self._thread.start()

    def send(self, message: ControlMessage) -> bool:
        self._deadline = max(self._deadline, message.renew_until or 0.0)
        self._control._handle_message(replace(message, renew_until=None))
        return True

    def poll(self) -> Exit | None:
        exit: Exit | None = self.fate.poll_exit()
        return exit

    def begin_kill(self) -> None:
        """Do nothing; `kill` waits for its end."""

    def kill(self) -> list[int]:
        self._thread.join()  # it cannot be killed; the benchmark fails if it was still working
        return []

    def close(self) -> Exit:
        self._thread.join()
        self.channel.close()
        self.fate.close()
        return Exit(code=0)

    def _train(self, job_path: Path) -> None:
        if self._rank > 0:  # only rank 0 simulates training
            self.fate.set(Exit(code=0))
            return
        job = JobSpec.from_file(job_path)
        report = Reporter(self.channel.trainer_fds[0])
        journal = Journal(job.journal, job.attempt)
        journal.record_start()
        result = FakeTrainer(job, report, self._control, journal).run()
        journal.record_stop(result["outcome"])
        report.send({"type": "result", **result})
        if since_boot() > self._deadline:
            overdue.append(job.run_id)
        self.fate.set(Exit(code=0))


class ThreadLauncher(Launcher):
    """Launcher of trainers in threads."""

    def start(self) -> list[int]:
        return []

    def launch(
        self,
        entry: str,
        job_path: Path,
        devices: Sequence[AssignedDevice],
        lock_paths: Sequence[Path] = (),
        *,
        place: RankPlace | None = None,
        renew_until: Callable[[], float] | None = None,
        should_end: Callable[[], bool] | None = None,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> TrainingProcess:
        assert renew_until is not None
        return TrainerThread(job_path, renew_until(), place.rank if place else 0)


def start_worker(settings: Settings) -> WorkerService:
    """Register a worker, and let it follow hints, with a thread for each of its devices."""
    context = WorkerContext(settings)
    context.launcher = ThreadLauncher(settings)
    context.backends = ["fake"]
    service = WorkerService(context)
    assert service.start()
    for _ in range(context.machine.slots):
        threading.Thread(target=follow_hints, args=(context,), name="hints", daemon=True).start()
    return service


def follow_hints(context: WorkerContext) -> None:
    """Take hints as Celery's transport does, and train runs until none is left."""
    client: Redis = Redis.from_url(context.settings.redis_url or "", socket_timeout=30)
    while not context.closing.is_set():
        try:
            if client.brpop([QUEUE], timeout=5):
                supervisor.train_pending_runs(context)
        except RedisError as error:
            logging.warning("no hints: %s", error)


def watch() -> None:
    """Keep the durations of claims and the silences of leases."""
    claim, leave = supervisor.claim, Lease.__exit__

    def timed_claim(context: WorkerContext) -> Any:
        began = time.monotonic()
        run = claim(context)
        if run is not None:
            claims.append(time.monotonic() - began)
        return run

    def noted_exit(lease: Lease, *details: object) -> None:
        silences.append(lease.longest_silence)
        leave(lease, *details)

    supervisor.claim = timed_claim
    Lease.__exit__ = noted_exit  # type: ignore[method-assign]
    # It reads /proc for each process of the machine, for each run; here all trainers are one process.
    memory_watch.MemoryWatch.sample_if_due = lambda *_: None  # type: ignore[method-assign]


def main() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(512 * 1024)
    logging.basicConfig(level=logging.WARNING)
    watch()
    services = [start_worker(get_settings()) for _ in range(int(sys.argv[1]))]
    print("ready", flush=True)
    sys.stdin.read()
    for service in services:
        service.stop_claiming()
    print(json.dumps({"claims": claims, "silences": silences, "overdue": overdue}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
