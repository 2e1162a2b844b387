"""What a fault may cost, whom it reaches and for how long: on this alone a loss counts as explained."""

from collections.abc import Iterator

from tests.chaos.course import Course, Loss
from tests.chaos.history import FaultRecord, History
from tests.chaos.machine import SLOWNESS

SLACK = 6.0 * SLOWNESS
"""Seconds that a busy machine may take beyond what the leases explain."""
EVERYBODY = ("postgres", "all")
"""Targets that reach every worker."""
LOOK_SECONDS = 0.5
_CLOCKS_DIFFER_BY = 0.001
"""Seconds: what a float of a time stamp may be off."""


def place(fault: FaultRecord) -> str:
    """What the fault was done to; some name a checkpoint behind it."""
    return fault.target.partition(" ")[0]


def reaches(fault: FaultRecord, worker: str | None) -> bool:
    """Whether the fault is one of this worker, or of what every worker needs."""
    return place(fault) in EVERYBODY or (worker is not None and place(fault) == worker)


def worker_of(history: History, course: Course, attempt: int) -> str | None:
    """The service that had the attempt; None if nobody knows that worker."""
    rows = (row.get("worker_id") for row in course.attempts if row["attempt"] == attempt)
    return history.workers.get(next(rows, None) or "")


def over_at(fault: FaultRecord, lease_seconds: float) -> float:
    """The latest moment at which the fault may still cost a run.

    A lease has to run out, and after Postgres was away there is one of grace. Nothing stretches this: whatever keeps
    the reaper or the database from working meanwhile is a fault that reaches every worker, with a time of its own.
    """
    return fault.ended + 2 * lease_seconds + SLACK


def may_cost(history: History, fault: FaultRecord, worker: str | None, how: str, when: float) -> bool:
    """Whether the fault may be why a run was taken from this worker at this moment, in this way.

    To hand a run back is what a worker does that is told to end, and a full storage keeps an attempt from being
    prepared: neither is ever the work of anything else.
    """
    if not fault.requeues or not fault.began - _CLOCKS_DIFFER_BY <= when <= over_at(fault, history.lease_seconds):
        return False
    if place(fault) == "storage":
        return how == "retried"
    if how == "handed_back":
        return worker is not None and place(fault) == worker
    return reaches(fault, worker)


def is_explained(history: History, course: Course, loss: Loss) -> bool:
    """Whether the suite did something that may have cost the attempt."""
    worker = worker_of(history, course, loss.move.attempt)
    return any(may_cost(history, fault, worker, loss.how, loss.move.ts) for fault in history.faults)


def a_clock_was_wrong(history: History, when: float) -> bool:
    """Whether it was, or had only just been."""
    return any(
        "clock" in fault.kind and fault.began <= when <= fault.ended + history.lease_seconds + SLACK
        for fault in history.faults
    )


def moments_without_excuse(history: History, course: Course) -> Iterator[float]:
    """Moments in the life of its attempts, one every half second, in which a lost worker would be a violation."""
    for row in course.attempts:
        claim, end = course.claim_of(row["attempt"]), course.end_of(row["attempt"])
        worker = worker_of(history, course, row["attempt"])
        if claim is None or end is None:
            continue
        excuses = [fault for fault in history.faults if fault.requeues and reaches(fault, worker)]
        when = claim.ts
        while when < end.ts:
            if not any(may_cost(history, fault, worker, "lost", when) for fault in excuses):
                yield when
            when += LOOK_SECONDS


def is_disturbed(history: History, course: Course, attempt: int, since: float, until: float) -> bool:
    """Whether anything was done to the attempt, its worker, its storage or its database in this time."""
    worker = worker_of(history, course, attempt)
    return course.pid_of(attempt) in history.killed_trainers or any(
        (reaches(fault, worker) or place(fault) == "storage")
        and fault.began - SLACK <= until
        and over_at(fault, history.lease_seconds) >= since
        for fault in history.faults
    )
