"""Claim of a pending run by a worker with free devices: the policy of the queue chooses, one statement takes.

All claims take turns, so each sees the devices and the quotas that those before it have taken. The order, fit, quotas
and holds are those of `app.runs.queue.policy`; runs hold what the last round has stored for them.
"""

from dataclasses import replace
from functools import cache
from typing import Any

from sqlalchemy import Connection, Executable, Row

from app.runs.queue.candidates import read_candidates
from app.runs.queue.fit import Fleet
from app.runs.queue.fleet import NearFleet, read_near_fleet
from app.runs.queue.holds_table import read_quota_uses, take_turn
from app.runs.queue.policy import Assignment, Claim, OrderKey, Snapshot, order_key, schedule
from app.runs.state import machine

_FIRST_PAGE = 4
_PAGE_FACTOR = 16
_MOST_SKIPPED = 16
"""Runs that other transactions are just changing, after which a worker waits for its next hint."""


def claim_run(
    connection: Connection, worker_id: str, lease_seconds: float, only_run: tuple[str, int] | None = None
) -> Row[Any] | None:
    """Claim the first pending run that may start on the free devices of a worker, in this transaction.

    A worker that was started for one run claims `only_run`: its id and the lease epoch for which the worker was
    started. A run on several hosts is claimed with its devices on all workers that it holds, of which this one is the
    lead. The row is that of `machine.claim`; None if no run may start here.
    """
    take_turn(connection)
    near = read_near_fleet(connection, worker_id, lease_seconds)
    if near is None or near.is_paused:
        return None
    if all(device.run_id is not None or device.paused for device in near.worker.devices):
        return None
    choice = _Choice(connection, near, only_run)
    for _ in range(_MOST_SKIPPED + 1):
        assignment = choice.first_assignment()
        if assignment is None:
            return None
        run_id = assignment.run.run_id
        parameters = _chosen_devices(assignment, choice.lease_epoch(run_id), near.fleet)
        row = connection.execute(_claim(worker_id, lease_seconds), parameters).one_or_none()
        if row is not None:
            return row
        choice.skip(run_id)
    return None


def _chosen_devices(assignment: Assignment, epoch: int, fleet: Fleet) -> dict[str, Any]:
    offers = {offer.worker_id: offer for offer in fleet.workers}
    chosen = [
        (part, worker_id, offers[worker_id].devices[position].index)
        for part, (worker_id, positions) in enumerate(assignment.devices.items())
        for position in sorted(positions)
    ]
    lead = next(iter(assignment.devices))
    return machine.chosen_devices(assignment.run.run_id, epoch, offers[lead].model, chosen)


class _Choice:
    """Choice of the run that a worker claims."""

    def __init__(self, connection: Connection, near: NearFleet, only_run: tuple[str, int] | None) -> None:
        self._connection = connection
        self._near = near
        self._only_run = only_run
        # Beside the first runs, those behind a holder that are known to end in time.
        others = list(near.holds.seconds[near.worker.device]) if only_run is None else [only_run[0]]
        self._run_ids = [*near.holds.run_ids(), *others]
        self._quota_uses = read_quota_uses(connection, near.holds)
        self._page = _FIRST_PAGE if only_run is None else 0
        self._candidates = read_candidates(connection, near, self._page, run_ids=self._run_ids)
        self._skipped: set[str] = set()

    def lease_epoch(self, run_id: str) -> int:
        """Return the lease epoch with which a run that was read is claimed."""
        return self._candidates.lease_epochs[run_id] if self._only_run is None else self._only_run[1]

    def skip(self, run_id: str) -> None:
        """Choose another run from now on; what this one holds stays held."""
        self._skipped.add(run_id)

    def first_assignment(self) -> Assignment | None:
        """Return the first run that may start, with its devices; reads more runs until it is certain."""
        while True:
            snapshot, claim = self._snapshot()
            assignment = next(iter(schedule(snapshot).assignments), None)
            end = self._candidates.end
            if self._only_run is not None or end is None or self._is_certain(end, assignment, claim):
                return assignment
            of_owner, self._page = self._page, self._page * _PAGE_FACTOR
            full_quotas = {quota: hold.run for quota, hold in claim.quota_holds.items() if hold.spare == 0}
            self._candidates = read_candidates(
                self._connection, self._near, self._page, of_owner, run_ids=self._run_ids, full_quotas=full_quotas
            )

    def _snapshot(self) -> tuple[Snapshot, Claim]:
        candidates, near = self._candidates, self._near
        holders = {run_id: candidates.runs[run_id] for run_id in near.holds.run_ids() if run_id in candidates.runs}
        claim = Claim(
            near.worker.worker_id,
            near.holds.worker_holds(near.fleet, holders, near.now),
            near.holds.quota_holds_of(holders, self._quota_uses, near.now),
        )
        runs = [
            replace(run, is_ready=False) if run.run_id in self._skipped else run for run in candidates.runs.values()
        ]
        if self._only_run is not None:
            runs = [run for run in runs if run.run_id == self._only_run[0]]
        snapshot = Snapshot(
            near.fleet,
            runs,
            near.holds.seconds_on,
            used=candidates.used,
            limits=candidates.rooms,  # what runs that train leave of them
            claim=claim,
        )
        return snapshot, claim

    def _is_certain(self, end: OrderKey, assignment: Assignment | None, claim: Claim) -> bool:
        """Return True if no run that was not read may start before the one that was chosen."""
        used = self._candidates.used
        if assignment is not None:
            return order_key(assignment.run, used) <= end
        blocking = [
            hold.run
            for hold in claim.holds.values()
            if self._near.worker.worker_id in hold.devices and hold.spare(self._near.worker.worker_id) == 0
        ]
        return any(order_key(run, used) < end for run in blocking)


@cache
def _claim(worker_id: str, lease_seconds: float) -> Executable:
    # It is the same for every claim of a worker, and building it takes longer than executing it.
    return machine.claim(worker_id, lease_seconds)
