"""Forecast of the queue: when each pending run starts, if predicted durations hold. No database."""

import heapq
import math
from collections import Counter
from dataclasses import dataclass

from app.runs.queue.fit import WorkerOffer
from app.runs.queue.policy import QueueState, Snapshot


@dataclass(frozen=True)
class PredictedStart:
    """Predicted start of a pending run."""

    worker: WorkerOffer | None
    """Worker on which it starts, the first if it needs several; None: no worker could take it."""
    start: float
    """Seconds after the snapshot; infinite if unknown."""
    runs_before: int
    """Runs that start before it on a worker that could take it as well."""


def predict_starts(snapshot: Snapshot) -> dict[str, PredictedStart]:
    """Return the predicted start of each waiting run, by id; plans the queue whenever something changes."""
    state = QueueState(snapshot)
    starts: dict[str, PredictedStart] = {}
    starts_on: Counter[str] = Counter()

    def add_start(run_id: str, worker_id: str, start: float, fitting: list[str]) -> None:
        runs_before = sum(starts_on[fitting_id] for fitting_id in fitting)
        starts[run_id] = PredictedStart(state.workers[worker_id], start, runs_before)
        starts_on[worker_id] += 1

    times = {0.0, *(run.not_before for run in snapshot.waiting), *(run.end for run in snapshot.training)}
    times.update(time for of_worker in state.frees_at.values() for time in of_worker)
    events = [time for time in times if 0.0 <= time < math.inf]
    heapq.heapify(events)
    while events and state.waiting:
        now = heapq.heappop(events)
        while events and events[0] <= now:
            heapq.heappop(events)
        for assignment in state.schedule(now).assignments:
            run = assignment.run
            add_start(run.run_id, next(iter(assignment.devices)), now, list(state.fitting_devices(run)))
            end = state.start(assignment)
            if end < math.inf:
                heapq.heappush(events, end)
    for run in state.waiting_in_order():
        fitting = list(state.fitting_devices(run))
        if len(fitting) >= run.needs.hosts:
            add_start(run.run_id, fitting[0], math.inf, fitting)
        else:
            starts[run.run_id] = PredictedStart(None, math.inf, 0)
    return starts
