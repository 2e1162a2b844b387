"""Claim of a pending run by a worker with free devices: the policy of the queue chooses, one statement takes.

All claims take turns, so each sees the devices and the quotas that those before it have taken. The order, fit, quotas
and holds are those of `app.runs.queue.policy`; runs hold what the last round has stored for them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from sqlalchemy import Connection, Executable, Row

from app.runs.queue.candidates import Candidates, read_candidates
from app.runs.queue.fit import Fleet, WorkerOffer
from app.runs.queue.fleet import read_near_fleet
from app.runs.queue.holds import StoredHolds
from app.runs.queue.holds_table import read_holds, read_quota_uses, take_turn
from app.runs.queue.policy import Assignment, Claim, OrderKey, Snapshot, WaitingRun, order_key, schedule
from app.runs.state import machine

_FIRST_PAGE = 16
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
    holds, now = read_holds(connection)
    worker, fleet = read_near_fleet(connection, worker_id, holds.partners(worker_id), lease_seconds)
    if worker is None or all(device.run_id is not None or device.paused for device in worker.devices):
        return None
    choice = _Choice(connection, worker, fleet, holds, now, only_run)
    for _ in range(_MOST_SKIPPED + 1):
        assignment = choice.first_assignment()
        if assignment is None:
            return None
        run_id = assignment.run.run_id
        row = _take(connection, assignment, choice.lease_epoch(run_id), fleet, worker_id, lease_seconds)
        if row is not None:
            return row
        choice.skip(run_id)
    return None


def _take(
    connection: Connection, assignment: Assignment, epoch: int, fleet: Fleet, worker_id: str, lease_seconds: float
) -> Row[Any] | None:
    offers = {offer.worker_id: offer for offer in fleet.workers}
    chosen = [
        (part, partner, offers[partner].devices[position].index)
        for part, (partner, positions) in enumerate(assignment.devices.items())
        for position in sorted(positions)
    ]
    parameters = machine.chosen_devices(assignment.run.run_id, epoch, chosen)
    return connection.execute(_claim(worker_id, lease_seconds), parameters).one_or_none()


class _Choice:
    """Choice of the run that a worker claims."""

    def __init__(
        self,
        connection: Connection,
        worker: WorkerOffer,
        fleet: Fleet,
        holds: StoredHolds,
        now: float,
        only_run: tuple[str, int] | None,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._fleet = fleet
        self._holds = holds
        self._now = now
        self._only_run = only_run
        is_held = any(worker.worker_id in hold.devices for hold in holds.holds)
        # Runs behind a holder that are known to end in time.
        self._short_runs = list(holds.seconds.get(worker.device, {})) if is_held or holds.quota_holds else []
        self._quota_uses = read_quota_uses(connection, holds)
        self._page = _FIRST_PAGE
        self._candidates = self._read(_FIRST_PAGE)
        self._skipped: set[str] = set()

    def lease_epoch(self, run_id: str) -> int:
        """Return the lease epoch of a run that was read."""
        return self._candidates.lease_epochs[run_id]

    def skip(self, run_id: str) -> None:
        """Choose another run from now on; what this one holds stays held."""
        self._skipped.add(run_id)

    def first_assignment(self) -> Assignment | None:
        """Return the first run that may start, with its devices; reads more runs until it is certain."""
        while True:
            snapshot, claim = self._snapshot()
            assignment = next(iter(schedule(snapshot).assignments), None)
            if self._candidates.end is None or self._is_certain(self._candidates.end, assignment, claim):
                return assignment
            of_owner, self._page = self._page, self._page * _PAGE_FACTOR
            full_quotas = {quota: hold.run for quota, hold in claim.quota_holds.items() if hold.spare == 0}
            self._candidates = self._read(self._page, of_owner, full_quotas)

    def _read(
        self, most: int, of_owner: int | None = None, full_quotas: Mapping[str, WaitingRun] | None = None
    ) -> Candidates:
        return read_candidates(
            self._connection,
            self._worker,
            self._fleet,
            most,
            of_owner,
            short_runs=self._short_runs,
            holders=self._holds.run_ids(),
            full_quotas=full_quotas or {},
            only_run=self._only_run,
        )

    def _snapshot(self) -> tuple[Snapshot, Claim]:
        candidates = self._candidates
        holders = {run_id: candidates.runs[run_id] for run_id in self._holds.run_ids() if run_id in candidates.runs}
        claim = Claim(
            self._worker.worker_id,
            self._holds.worker_holds(self._fleet, holders, self._now),
            self._holds.quota_holds_of(holders, self._quota_uses, self._now),
        )
        runs = [
            replace(run, is_ready=False) if run.run_id in self._skipped else run for run in candidates.runs.values()
        ]
        if self._only_run is not None:
            runs = [run for run in runs if run.run_id == self._only_run[0]]
        snapshot = Snapshot(
            self._fleet,
            runs,
            self._holds.seconds_on,
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
            if self._worker.worker_id in hold.devices and hold.spare(self._worker.worker_id) == 0
        ]
        return any(order_key(run, used) < end for run in blocking)


@cache
def _claim(worker_id: str, lease_seconds: float) -> Executable:
    # It is the same for every claim of a worker, and building it takes longer than executing it.
    return machine.claim(worker_id, lease_seconds)
