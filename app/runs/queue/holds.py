"""Holds of a plan for runs on several devices, which claims read until the next plan is stored. No database.

Claims go on while a plan is computed and after it is stored. A stored plan therefore names the runs that trained when
it was read: a device that another run has taken since is no longer free when the holder can start.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from pydantic import BaseModel

from app.runs.queue.fit import Fleet, WorkerOffer
from app.runs.queue.policy import Assignment, Hold, Plan, QueueState, QuotaHold, Snapshot, WaitingRun, order_key

_MOST_SECONDS = 1e9


class StoredHold(BaseModel):
    """Workers that keep devices for a run."""

    run_id: str
    hosts: int
    starts_at: float | None
    """Unix time when all of them have enough free devices; None if unknown."""
    devices: dict[str, list[int]]
    """Devices of each worker that fit the run and are free at its start."""


class StoredQuotaHold(BaseModel):
    """Quota that keeps devices for a run."""

    quota_id: str
    run_id: str
    starts_at: float | None
    spare: int
    """Devices of the quota that later runs may use however long they take."""
    assigned: set[str] = set()
    """Runs before it that the plan starts and that do not end before it starts: `spare` is without their devices."""


class QuotaUse(NamedTuple):
    """Run that uses devices of a quota."""

    quota_id: str
    run_id: str
    devices: int
    device: str
    """Name of its devices."""


class StoredHolds(BaseModel):
    """Holds of a plan, with what they were computed from."""

    holds: list[StoredHold] = []
    quota_holds: list[StoredQuotaHold] = []
    training: set[str] = set()
    """Runs that trained; of those that hold devices at the start of a holder, all end before that."""
    seconds: dict[str, dict[str, float]] = {}
    """Predicted durations of pending runs that may end before a holder starts, by name of the devices and by run."""

    @classmethod
    def of_plan(cls, plan: Plan, snapshot: Snapshot, now: float) -> Self:
        """Return what claims need of a plan; `now` is the Unix time of its snapshot."""
        workers = {worker.worker_id: worker for worker in snapshot.fleet.workers}
        # A run on several hosts starts only on workers that it holds, also if it can start now.
        starting = [_hold_of(assignment, workers) for assignment in plan.assignments if assignment.run.needs.hosts > 1]
        holds = [*plan.holds, *starting]
        if not holds and not plan.quota_holds:
            return cls()
        starts = [hold.start for hold in holds] + [hold.start for hold in plan.quota_holds.values()]
        return cls(
            holds=[
                StoredHold(
                    run_id=hold.run.run_id,
                    hosts=hold.run.needs.hosts,
                    starts_at=_unix_time(now, hold.start),
                    devices={worker_id: sorted(indexes) for worker_id, indexes in hold.devices.items()},
                )
                for hold in holds
            ],
            quota_holds=[
                StoredQuotaHold(
                    quota_id=quota_id,
                    run_id=hold.run.run_id,
                    starts_at=_unix_time(now, hold.start),
                    spare=hold.spare,
                    assigned=_assigned_before(hold, plan, snapshot),
                )
                for quota_id, hold in plan.quota_holds.items()
            ],
            training={run.run_id for run in snapshot.training},
            seconds=_shorter_runs(snapshot, max((start for start in starts if start < math.inf), default=0.0)),
        )

    def run_ids(self) -> list[str]:
        """Return the ids of the runs that hold something."""
        return list(dict.fromkeys([hold.run_id for hold in self.holds] + [hold.run_id for hold in self.quota_holds]))

    def seconds_on(self, run: WaitingRun, worker: WorkerOffer) -> float:
        """Return the predicted duration of a run on a worker; infinite if it would not end in time, or is unknown."""
        return self.seconds.get(worker.device, {}).get(run.run_id, math.inf)

    def worker_holds(self, fleet: Fleet, holders: Mapping[str, WaitingRun], now: float) -> dict[str, Hold]:
        """Return the holds of runs that still wait, without the devices of `fleet` that others have taken since."""
        workers = {worker.worker_id: worker for worker in fleet.workers}
        holds: dict[str, Hold] = {}
        for stored in self.holds:
            if (run := holders.get(stored.run_id)) is None:
                continue
            start = _seconds_from(now, stored.starts_at)
            devices = {
                worker_id: frozenset(
                    index
                    for index in indexes
                    if worker_id not in workers or self._is_free_at(start, workers[worker_id], index)
                )
                for worker_id, indexes in stored.devices.items()
            }
            holds[run.run_id] = Hold(run, start, devices)
        return holds

    def quota_holds_of(
        self, holders: Mapping[str, WaitingRun], uses: Iterable[QuotaUse], now: float
    ) -> dict[str, QuotaHold]:
        """Return the holds of quotas by runs that still wait, without the devices that others have taken since.

        `uses` are those of the quotas by runs that train now.
        """
        uses = list(uses)
        holds: dict[str, QuotaHold] = {}
        for stored in self.quota_holds:
            if (run := holders.get(stored.run_id)) is None:
                continue
            start = _seconds_from(now, stored.starts_at)
            taken = sum(
                use.devices
                for use in uses
                if use.quota_id == stored.quota_id
                and use.run_id not in stored.assigned
                and not self._ends_by(start, use.run_id, use.device)
            )
            holds[stored.quota_id] = QuotaHold(run, start, max(stored.spare - taken, 0))
        return holds

    def _is_free_at(self, start: float, worker: WorkerOffer, index: int) -> bool:
        if index >= len(worker.devices):
            return False
        run_id = worker.devices[index].run_id
        return run_id is None or self._ends_by(start, run_id, worker.device)

    def _ends_by(self, start: float, run_id: str, device: str) -> bool:
        """Return True if the plan counted on the end of a run, or if one that has started since ends in time."""
        return run_id in self.training or self.seconds.get(device, {}).get(run_id, math.inf) <= start < math.inf


def _hold_of(assignment: Assignment, workers: Mapping[str, WorkerOffer]) -> Hold:
    """Return what an assignment holds until it is claimed: every free device that fits, as any of them will do."""
    needs = assignment.run.needs
    free = {
        worker_id: frozenset(
            index
            for index, device in enumerate(workers[worker_id].devices)
            if device.run_id is None and not device.paused and needs.fits(workers[worker_id].kind, device)
        )
        for worker_id in assignment.devices
    }
    return Hold(assignment.run, 0.0, free)


def _assigned_before(hold: QuotaHold, plan: Plan, snapshot: Snapshot) -> set[str]:
    workers, place = {worker.worker_id: worker for worker in snapshot.fleet.workers}, order_key(hold.run, snapshot.used)
    assigned = set()
    for assignment in plan.assignments:
        run = assignment.run
        end = max(snapshot.seconds(run, workers[worker_id]) for worker_id in assignment.devices)
        if order_key(run, snapshot.used) < place and not end <= hold.start < math.inf:
            assigned.add(run.run_id)
    return assigned


def _shorter_runs(snapshot: Snapshot, start: float) -> dict[str, dict[str, float]]:
    """Return the durations of pending runs that are shorter than `start`, by name of devices that they fit, and run."""
    if start <= 0:
        return {}
    state, shorter_runs = QueueState(snapshot), defaultdict[str, dict[str, float]](dict)
    workers_of_kind: dict[int, dict[str, WorkerOffer]] = {}
    for run in snapshot.waiting:
        if (kind := state.needs_kind(run)) not in workers_of_kind:
            fitting_workers = [state.workers[worker_id] for worker_id in state.fitting_devices(run)]
            workers_of_kind[kind] = {worker.device: worker for worker in fitting_workers}
        for device, worker in workers_of_kind[kind].items():
            if (seconds := snapshot.seconds(run, worker)) < start:
                shorter_runs[device][run.run_id] = round(seconds, 1)
    return shorter_runs


def _unix_time(now: float, start: float) -> float | None:
    return None if math.isinf(start) else now + min(start, _MOST_SECONDS)


def _seconds_from(now: float, starts_at: float | None) -> float:
    return math.inf if starts_at is None else max(starts_at - now, 0.0)
