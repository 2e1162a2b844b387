"""Simulates the queue to predict when each pending run starts. No database.

Whenever a device of a worker becomes free, the worker claims runs as long as one fits its free devices: the first that
fits, by priority and then age, on the smallest of them that it fits. So a run that needs two devices is overtaken by
later ones that need one.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.runs.scheduler.placement import Needs, WorkerOffer


@dataclass(frozen=True)
class WorkerSlots:
    """An online worker, and when its devices are free."""

    offer: WorkerOffer
    free: tuple[float, ...]
    """Seconds until each device is free; infinite if unknown."""

    def fitting(self, needs: Needs, gpu_backends: frozenset[str]) -> tuple[int, ...]:
        """Return the devices that a run fits on, the smallest first; none if the worker cannot take it."""
        offer = self.offer
        if not needs.allows_worker(offer, gpu_backends):
            return ()
        memory = [device.memory_mb for device in offer.devices]
        large = [at for at, room in enumerate(memory) if needs.memory_on(offer.kind) <= room]
        return tuple(sorted(large, key=lambda at: memory[at])) if len(large) >= needs.devices else ()


@dataclass(frozen=True)
class PendingRun:
    """A pending run in the queue."""

    run_id: str
    needs: Needs
    not_before: float
    """Seconds from now."""


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
    workers: Sequence[WorkerSlots],
    queue: Sequence[PendingRun],
    seconds: Callable[[PendingRun, WorkerSlots], float],
    gpu_backends: frozenset[str] = frozenset(),
) -> dict[str, PredictedStart]:
    """Predict where and when each run of a queue starts, by id; `seconds` returns the duration of one on a worker.

    It is called once for each run that starts, in the order of starts, and may return infinity for unknown.
    `gpu_backends` are those of `Fleet`.
    """
    # For each run, the workers that could take it, with the devices on which it fits.
    fitting = {
        run.run_id: {
            at: devices for at, worker in enumerate(workers) if (devices := worker.fitting(run.needs, gpu_backends))
        }
        for run in queue
    }
    found = {run.run_id: PredictedStart(None, math.inf, 0) for run in queue}
    waiting = {run.run_id: run for run in queue if fitting[run.run_id]}
    claims = [0] * len(workers)
    free = [list(worker.free) for worker in workers]
    # Times at which a device of a worker becomes free, or a run may be claimed again.
    pauses = {run.not_before for run in waiting.values() if run.not_before > 0}
    events = [(when, at) for at, worker in enumerate(workers) for when in {*worker.free, *pauses} if when < math.inf]
    heapq.heapify(events)

    def claim(run: PendingRun, at: int, start: float) -> None:
        del waiting[run.run_id]
        found[run.run_id] = PredictedStart(workers[at], start, sum(claims[other] for other in fitting[run.run_id]))
        claims[at] += 1

    def idle(run: PendingRun, at: int, now: float) -> list[int]:
        return [device for device in fitting[run.run_id].get(at, ()) if free[at][device] <= now]

    while events and waiting:
        now, at = heapq.heappop(events)
        while any(when <= now for when in free[at]):
            ready = (
                (run, on)
                for run in waiting.values()
                if run.not_before <= now and len(on := idle(run, at, now)) >= run.needs.devices
            )
            if (taken := next(ready, None)) is None:
                break
            run, on = taken
            claim(run, at, now)
            until = now + seconds(run, workers[at])
            for device in on[: run.needs.devices]:
                free[at][device] = until
            if until < math.inf:
                heapq.heappush(events, (until, at))
    for run in list(waiting.values()):
        claim(run, next(iter(fitting[run.run_id])), math.inf)
    return found
