"""Simulates the queue to predict when each pending run starts. No database.

Whenever a device of a worker becomes free, the worker claims runs as long as one fits its free devices: the first that
fits, by priority and then age. So a run that needs two devices is overtaken by later ones that need one.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerSlots:
    """An online worker with its devices."""

    worker_id: str
    backends: frozenset[str]
    kind: str
    device: str
    memory_mb: int
    free: tuple[float, ...]
    """Seconds until each device is free; infinite if unknown."""


@dataclass(frozen=True)
class PendingRun:
    """A pending run in the queue."""

    run_id: str
    backend: str
    kind: str | None
    memory_mb: int
    devices: int
    not_before: float
    """Seconds from now."""

    def fits(self, worker: WorkerSlots) -> bool:
        """Return True if a worker could ever take it, by the same conditions as a claim."""
        return (
            self.backend in worker.backends
            and self.kind in (None, worker.kind)
            and self.memory_mb <= worker.memory_mb
            and self.devices <= len(worker.free)
        )


@dataclass(frozen=True)
class PredictedStart:
    """Predicted start of a pending run."""

    worker: WorkerSlots | None
    """Worker on which it starts; None: no worker could take it."""
    start: float
    """Seconds from now; infinite if unknown."""
    before: int
    """Runs that start before it on a worker that could take it as well."""


def simulate_queue(
    workers: Sequence[WorkerSlots], queue: Sequence[PendingRun], seconds: Callable[[PendingRun, WorkerSlots], float]
) -> dict[str, PredictedStart]:
    """Predict where and when each run of a queue starts, by id; `seconds` returns the duration of one on a worker.

    It is called once for each run that starts, in the order of starts, and may return infinity for unknown.
    """
    fitting = {run: [at for at, worker in enumerate(workers) if run.fits(worker)] for run in queue}
    found = {run.run_id: PredictedStart(None, math.inf, 0) for run in queue}
    waiting = dict.fromkeys(run for run in queue if fitting[run])
    claims = [0] * len(workers)
    free = [list(worker.free) for worker in workers]
    # Times at which a device of a worker becomes free, or a run may be claimed again.
    pauses = {run.not_before for run in waiting if run.not_before > 0}
    events = [(when, at) for at, worker in enumerate(workers) for when in {*worker.free, *pauses} if when < math.inf]
    heapq.heapify(events)

    def claim(run: PendingRun, at: int, start: float) -> None:
        del waiting[run]
        found[run.run_id] = PredictedStart(workers[at], start, sum(claims[other] for other in fitting[run]))
        claims[at] += 1

    while events and waiting:
        now, at = heapq.heappop(events)
        while idle := [device for device, when in enumerate(free[at]) if when <= now]:
            room = len(idle)
            ready = (run for run in waiting if run.devices <= room and run.not_before <= now and at in fitting[run])
            if (run := next(ready, None)) is None:
                break
            claim(run, at, now)
            until = now + seconds(run, workers[at])
            for device in idle[: run.devices]:
                free[at][device] = until
            if until < math.inf:
                heapq.heappush(events, (until, at))
    for run in list(waiting):
        claim(run, fitting[run][0], math.inf)
    return found
