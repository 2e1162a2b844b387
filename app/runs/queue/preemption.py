"""Preemption: runs of lower priority save and return to the queue, so that a run that waits too long can start.

No database: `app.runs.queue.planning` asks the runs.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anneal.contracts.run_task import RunTask
from app.config import Settings
from app.runs.queue.fit import Fleet, Needs, RunningRun, WorkerOffer
from app.runs.queue.policy import MOST_HOLDS, Plan, Snapshot, WaitingRun, order_key, quota_holder
from app.runs.queue.snapshot import Forecast

_MOST_HEADS = 20
_SERVING_TURN_SECONDS = 15.0
"""Time for which a serving run waits for the device of another one, which has had it for as long at least."""


@dataclass(frozen=True)
class Room:
    """Workers on which a run can start once other runs have left them: one for each host that it needs."""

    worker_ids: list[str]
    victims: list[str]


def choose_room(
    needs: Needs, priority: int, fleet: Fleet, training: Mapping[str, RunningRun], least_seconds: float
) -> Room | None:
    """Return runs of lower priority whose devices, with those that are free, are enough for a run.

    None if the run fits free devices, or if too few workers that are alike (`WorkerOffer.alike`) would have enough. Of
    several workers it is those on which the fewest devices are given up, then the least training since the last start.
    """
    options: dict[tuple[str, str], list[tuple[tuple[int, float], str, list[str]]]] = defaultdict(list)
    for worker in fleet.workers:
        if not needs.allows_worker(worker, fleet.gpu_backends):
            continue
        held, missing = _held_devices(needs, worker)
        victims = [
            training[run_id]
            for run_id in held
            if run_id in training and training[run_id].priority < priority and training[run_id].seconds >= least_seconds
        ]
        chosen = _fewest(victims, held, missing) if missing > 0 else []
        if chosen or missing <= 0:
            key = (sum(held[one.run_id] for one in chosen), sum(one.seconds for one in chosen))
            options[worker.alike].append((key, worker.worker_id, [one.run_id for one in chosen]))
    groups = [sorted(group)[: needs.hosts] for group in options.values() if len(group) >= needs.hosts]
    if not groups:
        return None
    best = min(groups, key=lambda group: group[-1][0])
    victims_of_all = list(dict.fromkeys(run_id for _, _, given_up in best for run_id in given_up))
    if not victims_of_all:
        return None
    return Room([worker_id for _, worker_id, _ in best], victims_of_all)


def _held_devices(needs: Needs, worker: WorkerOffer) -> tuple[dict[str, int], float]:
    """Return the number of fitting devices of each run on a worker, and how many the new run lacks."""
    fitting = [device for device in worker.devices if needs.fits(worker.kind, device) and not device.paused]
    if len(fitting) < needs.devices_each:
        return {}, math.inf
    held: dict[str, int] = {}
    for device in fitting:
        if device.run_id is not None:
            held[device.run_id] = held.get(device.run_id, 0) + 1
    return held, needs.devices_each - sum(device.run_id is None for device in fitting)


def _fewest(victims: Sequence[RunningRun], held: Mapping[str, int], missing: float) -> list[RunningRun]:
    """Return victims with enough devices, lowest priority and shortest training first; none if all are not enough."""
    chosen: list[RunningRun] = []
    for run in sorted(victims, key=lambda run: (run.priority, run.seconds)):
        if sum(held[other.run_id] for other in chosen) >= missing:
            break
        chosen.append(run)
    freed = sum(held[run.run_id] for run in chosen)
    if freed < missing:
        return []
    for run in list(chosen):  # those that a later, wider one has made superfluous
        if freed - held[run.run_id] >= missing:
            chosen.remove(run)
            freed -= held[run.run_id]
    return chosen


def preempt_for_first(
    forecast: Forecast, snapshot: Snapshot, plan: Plan, settings: Settings
) -> tuple[WaitingRun, Room] | None:
    """Return the first run that has waited too long, with runs that are to make room for it; None if there is none.

    Serving runs make room at once, and whatever the settings: they keep a device only while nothing else needs it. For
    each other they do so by turns, so that questions to one model do not keep another one from ever answering.
    """
    serving = _serving(forecast)
    request = _choose_request(forecast, snapshot, plan, serving, after_seconds=0.0, least_seconds=0.0)
    after_seconds = settings.preempt_after_seconds
    if request is None and after_seconds is not None:
        preemptible, least_seconds = _preemptible(forecast), settings.preempt_min_seconds
        request = _choose_request(forecast, snapshot, plan, preemptible, after_seconds, least_seconds)
    if request is None:
        begun = {run.id for run in forecast.live if run.start_step is not None}  # it answers before it ends
        below = {id: replace(run, priority=run.priority - 1) for id, run in serving.items() if id in begun}
        request = _choose_request(forecast, snapshot, plan, below, _SERVING_TURN_SECONDS, _SERVING_TURN_SECONDS)
    return request


def _choose_request(
    forecast: Forecast,
    snapshot: Snapshot,
    plan: Plan,
    training: Mapping[str, RunningRun],
    after_seconds: float,
    least_seconds: float,
) -> tuple[WaitingRun, Room] | None:
    if not training:
        return None
    held_by = {worker_id: hold.run for hold in plan.holds for worker_id in hold.devices}
    for run in _heads(forecast, snapshot, plan, after_seconds):
        # A later plan would drop the hold of a run beyond those that may have one, and its room be lost.
        others = {hold.run.run_id for hold in plan.holds} - {run.run_id}
        if run.needs.devices > 1 and len(others) >= MOST_HOLDS:
            continue
        place = order_key(run, snapshot.used)
        # On a worker that an earlier run holds, it could not start.
        workers = [
            worker
            for worker in snapshot.fleet.workers
            if (holder := held_by.get(worker.worker_id)) is None or place <= order_key(holder, snapshot.used)
        ]
        open_fleet = Fleet(workers, snapshot.fleet.gpu_backends)
        room = choose_room(run.needs, run.priority, open_fleet, training, least_seconds)
        if room is not None:
            return run, room  # the devices that become free are for this run; the next one waits until it has started
    return None


def _preemptible(forecast: Forecast) -> dict[str, RunningRun]:
    """Return the runs that lose no work if they make room.

    Evaluations and exports have no checkpoints, and a run that has made no step yet would only lose the time for
    loading its model.
    """
    return {
        run.id: _running(run)
        for run in forecast.live
        if RunTask(run.task).saves_checkpoints
        and run.stop_requested_ago is None
        and run.preempted_for is None
        and run.start_step is not None
        and run.current_step > run.start_step
    }


def _serving(forecast: Forecast) -> dict[str, RunningRun]:
    """Return the serving runs that have not been asked to end."""
    return {
        run.id: _running(run)
        for run in forecast.live
        if run.task == RunTask.serve and run.stop_requested_ago is None and run.preempted_for is None
    }


def _running(run: Any) -> RunningRun:
    return RunningRun(run.id, run.priority, run.owner, run.devices_needed, run.seconds)


def _heads(forecast: Forecast, snapshot: Snapshot, plan: Plan, after_seconds: float) -> list[WaitingRun]:
    """Return the first runs that have waited too long for devices.

    Neither one that waits for devices which others are giving up already, nor one that no worker could train or that
    waits for a quota.
    """
    awaited = {run.preempted_for for run in forecast.live}
    heads = []
    for run in sorted(snapshot.waiting, key=lambda run: order_key(run, snapshot.used)):
        row = forecast.pending[run.run_id]
        if row.waited < after_seconds or run.run_id in awaited:
            continue
        if row.pending_reason is not None and row.pending_reason["code"] != "reserved":
            continue
        has_room = all(run.needs.devices <= forecast.rooms.get(quota, math.inf) for quota in run.quotas)
        if has_room and quota_holder(run, snapshot, plan) is None:
            heads.append(run)
        if len(heads) == _MOST_HEADS:
            break
    return heads
