"""Promises about stops: 8 and 9."""

from collections.abc import Iterator

from tests.chaos.causes import is_disturbed, reaches, workers_of
from tests.chaos.course import RELEASED, Course, first_difference
from tests.chaos.history import History, StopCall, Violation

GRACE_LEASES = 2
STOP_SLACK = 10.0
"""Extra seconds for a busy machine, beyond the leases and the grace period."""
_CLOCKS_DIFFER_BY = 0.001
"""Seconds of rounding error of a timestamp as a float."""


def stop_always_wins(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 8: after an accepted stop the run ends and is never pending or claimed again.

    Sound: a stop is accepted under the run's row lock and committed before its response; claim and requeue read the
    stop under the same lock, and take the time of their events while they hold it. So a claim after the stop sees it,
    and an event later than the response comes after the stop. A run that was about to end may complete or fail, but not
    as `worker_lost`, which is also decided under the lock.
    """
    for stop in course.stops:
        requested_at = course.row["stop_requested_at"]
        if requested_at is None or requested_at.timestamp() > stop.answered + _CLOCKS_DIFFER_BY:
            yield course.broke(8, f"a stop was accepted at {stop.answered}, the run says {requested_at}")
        for move in course.moves:
            if move.ts > stop.answered + _CLOCKS_DIFFER_BY and move.target in ("pending", "initializing"):
                yield course.broke(8, f"{move.ts - stop.answered:.3f} s after a stop it became {move.target}")
    if course.stops and course.row["error_code"] == "worker_lost":
        yield course.broke(8, "a stop was accepted, and it failed as worker_lost")


def stop_is_bounded(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 9: a stopped run ends within the time limit, and all events of a graceful end are stored.

    Sound: the worker receives a stop with its next lease renewal, and kills a trainer that has not stopped after the
    grace period. A fault of the worker or of a shared dependency may delay this and starts its own period, in which
    leases expire. A trainer's journal has `stop` as its last line, and no earlier event is lost while its worker is
    alive: pipes are unbuffered and read to the end. If the worker died, the run was reaped, as the reason of the status
    change says.
    """
    for stop in course.stops:
        late = _end_of_run(course) - due_at(history, course, stop)
        if late > 0:
            yield course.broke(9, f"it ended {late:.1f} s later after a stop than the bound allows")
    for row in course.attempts:
        attempt = row["attempt"]
        if not ended_in_good_order(course, attempt):
            continue
        printed, dropped = course.printed_by(attempt)
        for what, stored, said in (
            ("lines", printed, None if dropped else course.to_be_printed(attempt)),
            ("metrics", course.measured_by(attempt), course.to_be_measured(attempt)),
        ):
            if said is not None and stored == said[: len(stored)] != said:
                missing = f"{len(said) - len(stored)} {what} are missing: {first_difference(stored, said)}"
                yield course.broke(9, f"attempt {attempt} ended in good order, but {missing}")


def due_at(history: History, course: Course, stop: StopCall) -> float:
    """Return the deadline of the stop: grace and leases after it, or leases after a fault in between."""
    recovery = 2 * history.lease_seconds + STOP_SLACK
    due = stop.answered + GRACE_LEASES * history.lease_seconds + recovery
    workers = workers_of(history, course, course.row["attempt"])
    for fault in sorted(history.faults, key=lambda fault: fault.began):
        if reaches(fault, workers) and fault.began <= due and fault.ended >= stop.answered:
            due = max(due, fault.ended + recovery)
    return due


def stop_saves(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 9: a stop with checkpoint saves the last step of the run, unless a fault interferes.

    Sound: a training process handles the stop after its current step and has the grace period to save. No other stop
    asked for less, and steps of earlier attempts were saved by those.
    """
    if not course.stops or not all(stop.save for stop in course.stops) or course.row["status"] != "cancelled":
        return
    attempt, requested_at = course.row["attempt"], course.row["stop_requested_at"]
    begins = [move.ts for move in course.moves if move.target == "running" and move.attempt == attempt]
    steps, end = course.steps_of(attempt), course.end_of(attempt)
    if not requested_at or not begins or not steps or not end or end.reason != "stopped on request":
        return
    if not begins[0] < requested_at.timestamp() < end.ts:
        return
    if is_disturbed(history, course, attempt, requested_at.timestamp(), end.ts):
        return
    saved = {row["step"] for row in course.checkpoints if row["deleted_at"] is None}
    if steps[-1] not in saved:
        yield course.broke(
            9, f"stopped at step {steps[-1]}, which should have been saved; its checkpoints: {sorted(saved)}"
        )


def ended_in_good_order(course: Course, attempt: int) -> bool:
    """Return True if the trainer ended by itself and its worker recorded it."""
    end = course.end_of(attempt)
    if end is None or course.outcome_of(attempt) not in ("stopped", "completed"):
        return False
    by_its_worker = end.target in ("completed", "cancelled", "pending") and "lost" not in end.reason
    return by_its_worker and (end.target != "pending" or end.reason.startswith(RELEASED))


def _end_of_run(course: Course) -> float:
    return course.moves[-1].ts if course.moves else 0.0


def phase_at(course: Course, stop: StopCall) -> str:
    """Return the status of the run at the time of the stop."""
    requested_at = course.row["stop_requested_at"]
    before = [move.target for move in course.moves if requested_at and move.ts <= requested_at.timestamp()]
    return before[-1] if before else "pending"
