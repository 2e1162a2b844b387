"""Rules for faults that explain a loss: which effects they may have, on which workers and for how long."""

import re
from collections.abc import Collection, Iterator

from tests.chaos.course import Course, Loss
from tests.chaos.history import FaultRecord, History
from tests.chaos.machine import SLOWNESS

SLACK = 6.0 * SLOWNESS
"""Extra seconds for a busy machine, beyond the leases."""
EVERYBODY = ("postgres", "all")
"""Targets that affect every worker."""
LOOK_SECONDS = 0.5
_CLOCKS_DIFFER_BY = 0.001
"""Seconds of rounding error of a timestamp as a float."""


_PREEMPTED = re.compile(r"preempted for run (\S+),")


def place(fault: FaultRecord) -> str:
    """Return the target of the fault, without the checkpoint id that some targets contain."""
    return fault.target.partition(" ")[0]


def reaches(fault: FaultRecord, workers: Collection[str]) -> bool:
    """Return True if the fault affects one of these workers or something that every worker needs."""
    return place(fault) in EVERYBODY or place(fault) in workers


def worker_of(history: History, course: Course, attempt: int) -> str | None:
    """Return the service that executed the attempt, or None for an unknown worker."""
    rows = (row.get("worker_id") for row in course.attempts if row["attempt"] == attempt)
    return history.workers.get(next(rows, None) or "")


def workers_of(history: History, course: Course, attempt: int) -> set[str]:
    """Return all services that executed the attempt: of a run on several hosts, also those of the other parts."""
    epochs = {row.get("lease_epoch") for row in course.attempts if row["attempt"] == attempt}
    others = {row["worker_id"] for row in history.parts.get(course.run_id, ()) if row["lease_epoch"] in epochs}
    worker_ids = {worker_of(history, course, attempt), *map(history.workers.get, others)}
    return {one for one in worker_ids if one is not None}


def over_at(fault: FaultRecord, lease_seconds: float) -> float:
    """Return the latest time at which the fault may still cause a loss.

    A lease has to expire, and after an outage of PostgreSQL there is one lease of grace. Nothing extends this: anything
    else that blocks the reaper or the database is a fault that affects every worker, with its own time.
    """
    return fault.ended + 2 * lease_seconds + SLACK


def may_cost(history: History, fault: FaultRecord, workers: Collection[str], how: str, when: float) -> bool:
    """Return True if the fault may have caused this kind of loss on these workers at this time.

    Only a worker that is shutting down releases runs, and only a full storage prevents an attempt from being prepared.
    """
    if not fault.requeues or not fault.began - _CLOCKS_DIFFER_BY <= when <= over_at(fault, history.lease_seconds):
        return False
    if place(fault) == "storage":
        return how == "retried"
    if how == "handed_back":
        return place(fault) in workers
    return reaches(fault, workers)


def is_explained(history: History, course: Course, loss: Loss) -> bool:
    """Return True if a fault of the suite explains the loss."""
    workers = workers_of(history, course, loss.move.attempt)
    return any(may_cost(history, fault, workers, loss.how, loss.move.ts) for fault in history.faults)


def made_room(history: History, course: Course, loss: Loss) -> bool:
    """Return True if the run was released for another one of higher priority that had been waiting by then."""
    match = _PREEMPTED.match(loss.move.reason)
    above = history.runs.get(match[1]) if match and loss.how == "handed_back" else None
    if above is None or above["priority"] <= course.row["priority"]:
        return False
    waits = (event.ts.timestamp() for event in history.events[above["id"]] if event.data.get("to") == "pending")
    return any(since <= loss.move.ts for since in waits)


def a_clock_was_wrong(history: History, when: float) -> bool:
    """Return True if a clock was wrong at this time or shortly before."""
    return any(
        "clock" in fault.kind and fault.began <= when <= fault.ended + history.lease_seconds + SLACK
        for fault in history.faults
    )


def moments_without_excuse(history: History, course: Course) -> Iterator[float]:
    """Yield times in its attempts, every half second, at which a loss would be a violation."""
    for row in course.attempts:
        claim, end = course.claim_of(row["attempt"]), course.end_of(row["attempt"])
        workers = workers_of(history, course, row["attempt"])
        if claim is None or end is None:
            continue
        excuses = [fault for fault in history.faults if fault.requeues and reaches(fault, workers)]
        when = claim.ts
        while when < end.ts:
            if not any(may_cost(history, fault, workers, "lost", when) for fault in excuses):
                yield when
            when += LOOK_SECONDS


def is_disturbed(history: History, course: Course, attempt: int, since: float, until: float) -> bool:
    """Return True if a fault affected the attempt, its worker, its storage or its database in this period."""
    workers = workers_of(history, course, attempt)
    return course.pid_of(attempt) in history.killed_trainers or any(
        (reaches(fault, workers) or place(fault) == "storage")
        and fault.began - SLACK <= until
        and over_at(fault, history.lease_seconds) >= since
        for fault in history.faults
    )
