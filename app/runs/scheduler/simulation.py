"""Simulates the queue to predict when each pending run starts. No database.

Whenever a device of a worker becomes free, the worker claims runs as long as one fits its free devices: the first that
fits, by priority and then age, on the smallest of them that it fits. Runs that need several devices reserve a worker,
as in `reservations.py`.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.runs.scheduler.placement import Needs, WorkerOffer
from app.runs.scheduler.reservations import PendingRun, Reservation, choose_reservations


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
class PredictedStart:
    """Predicted start of a pending run."""

    worker: WorkerSlots | None
    """Worker on which it starts; None: no worker could take it."""
    start: float
    """Seconds from now; infinite if unknown."""
    before: int
    """Runs that start before it on a worker that could take it as well."""


def fitting_devices(
    queue: Sequence[PendingRun], workers: Sequence[WorkerSlots], gpu_backends: frozenset[str]
) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return, for each run of a queue, the workers that could take it, with the devices on which it fits."""
    return {
        run.run_id: {
            at: devices for at, worker in enumerate(workers) if (devices := worker.fitting(run.needs, gpu_backends))
        }
        for run in queue
    }


def simulate_queue(
    workers: Sequence[WorkerSlots],
    queue: Sequence[PendingRun],
    seconds: Callable[[PendingRun, WorkerSlots], float],
    gpu_backends: frozenset[str] = frozenset(),
    reserved: Mapping[str, str] | None = None,
) -> dict[str, PredictedStart]:
    """Predict where and when each run of a queue starts, by id; `seconds` returns the duration of one on a worker.

    It may return infinity for unknown. `gpu_backends` are those of `Fleet`; `reserved` has the ids of the workers that
    runs have reserved.
    """
    return _Simulation(workers, queue, seconds, gpu_backends, reserved or {}).run()


class _Simulation:
    def __init__(
        self,
        workers: Sequence[WorkerSlots],
        queue: Sequence[PendingRun],
        seconds: Callable[[PendingRun, WorkerSlots], float],
        gpu_backends: frozenset[str],
        reserved: Mapping[str, str],
    ) -> None:
        self._workers = workers
        self._seconds = seconds
        self._fitting = fitting_devices(queue, workers, gpu_backends)
        self._found = {run.run_id: PredictedStart(None, math.inf, 0) for run in queue}
        self._places = {run.run_id: place for place, run in enumerate(queue)}
        self._waiting = {run.run_id: run for run in queue if self._fitting[run.run_id]}
        self._claims = [0] * len(workers)
        self._free = [list(worker.free) for worker in workers]
        places = {worker.offer.worker_id: at for at, worker in enumerate(workers)}
        self._held = {run: places[worker] for run, worker in reserved.items() if worker in places}
        self._wide = [run for run in self._waiting.values() if run.needs.devices > 1]
        # Times at which a device of a worker becomes free, or a run may be claimed again.
        pauses = {run.not_before for run in self._waiting.values() if run.not_before > 0}
        self._events = [
            (when, at) for at, worker in enumerate(workers) for when in {*worker.free, *pauses} if when < math.inf
        ]
        heapq.heapify(self._events)

    def run(self) -> dict[str, PredictedStart]:
        while self._events and self._waiting:
            now, at = heapq.heappop(self._events)
            while any(when <= now for when in self._free[at]):
                reservation = self._reservation(at, now)
                ready = (
                    (run, on)
                    for run in self._waiting.values()
                    if run.not_before <= now
                    and len(on := self._idle(run, at, now)) >= run.needs.devices
                    and (reservation is None or self._may_precede(run, reservation, now))
                )
                if (taken := next(ready, None)) is None:
                    break
                self._start(*taken, at, now)
        for run in list(self._waiting.values()):
            self._claim(run, next(iter(self._fitting[run.run_id])), math.inf)
        return self._found

    def _reservation(self, at: int, now: float) -> Reservation | None:
        """Return the reservation of a worker, and keep those of all for the next time."""
        if not self._wide:
            return None
        made = choose_reservations(self._wide, self._fitting, self._free, now, self._held)
        self._held = {one.run.run_id: one.worker for one in made}
        return next((one for one in made if one.worker == at), None)

    def _may_precede(self, run: PendingRun, reservation: Reservation, now: float) -> bool:
        wide = reservation.run
        if self._places[run.run_id] <= self._places[wide.run_id]:
            return True
        if run.needs.devices <= reservation.spare:
            return True
        return now + self._seconds(run, self._workers[reservation.worker]) <= reservation.start < math.inf

    def _idle(self, run: PendingRun, at: int, now: float) -> list[int]:
        return [device for device in self._fitting[run.run_id].get(at, ()) if self._free[at][device] <= now]

    def _start(self, run: PendingRun, on: Sequence[int], at: int, now: float) -> None:
        self._claim(run, at, now)
        until = now + self._seconds(run, self._workers[at])
        for device in on[: run.needs.devices]:
            self._free[at][device] = until
        if until < math.inf:
            heapq.heappush(self._events, (until, at))
        if run.needs.devices > 1:
            self._wide.remove(run)
            # Its reservation may have kept other workers' devices idle.
            for other in range(len(self._workers)):
                heapq.heappush(self._events, (now, other))

    def _claim(self, run: PendingRun, at: int, start: float) -> None:
        del self._waiting[run.run_id]
        before = sum(self._claims[other] for other in self._fitting[run.run_id])
        self._found[run.run_id] = PredictedStart(self._workers[at], start, before)
        self._claims[at] += 1
