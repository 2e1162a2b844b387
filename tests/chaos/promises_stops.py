"""Promises about stops: 8 and 9."""

from collections.abc import Iterator

from tests.chaos.causes import is_disturbed, reaches, worker_of
from tests.chaos.course import Course, first_difference
from tests.chaos.history import History, StopCall, Violation

GRACE_LEASES = 2
STOP_SLACK = 10.0
"""Seconds that a busy machine may take beyond what the leases and the grace explain."""
_CLOCKS_DIFFER_BY = 0.001
"""Seconds: what a float of a time stamp may be off."""


def stop_always_wins(history: History, course: Course) -> Iterator[Violation]:
    """8. After an accepted stop the run neither waits nor starts again, and ends.

    Sound: a stop is accepted under the run's row lock, and committed before its answer; claim and requeue read the
    stop under the same lock, and the time of their events is taken while they hold it. So one that comes after the
    stop has seen it, and one whose event is later than the answer comes after the stop. A run that was at its end
    may complete or fail, but not as `worker_lost`: that is decided under the lock too.
    """
    for stop in course.stops:
        asked = course.row["stop_requested_at"]
        if asked is None or asked.timestamp() > stop.answered + _CLOCKS_DIFFER_BY:
            yield course.broke(8, f"a stop was accepted at {stop.answered}, the run says {asked}")
        for move in course.moves:
            if move.ts > stop.answered + _CLOCKS_DIFFER_BY and move.target in ("pending", "initializing"):
                yield course.broke(8, f"{move.ts - stop.answered:.3f} s after a stop it became {move.target}")
    if course.stops and course.row["error_code"] == "worker_lost":
        yield course.broke(8, "a stop was accepted, and it failed as worker_lost")


def stop_is_bounded(history: History, course: Course) -> Iterator[Violation]:
    """9. A stopped run ends within the bound, and what a trainer said before it ended in good order is all stored.

    Sound: the worker hears of a stop with its next renewal, and kills what has not stopped after the grace. A fault of
    the worker or of what all workers need may keep it from that, and starts a time of its own, in which leases run
    out. A trainer's journal says `stop` after everything else, and nothing it said before can be lost while its worker
    lives: pipes are unbuffered and read to their end. When the worker died instead the run was taken back, and the
    reason of the move says so.
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
    """When the run has to have ended: grace and leases after the stop, or leases after a fault that came in between."""
    recovery = 2 * history.lease_seconds + STOP_SLACK
    due = stop.answered + GRACE_LEASES * history.lease_seconds + recovery
    worker = worker_of(history, course, course.row["attempt"])
    for fault in sorted(history.faults, key=lambda one: one.began):
        if reaches(fault, worker) and fault.began <= due and fault.ended >= stop.answered:
            due = max(due, fault.ended + recovery)
    return due


def stop_saves(history: History, course: Course) -> Iterator[Violation]:
    """9. A stop that asks for a checkpoint leaves one of the step at which the run ended, if nothing disturbs it.

    Sound: a trainer that trains hears of the stop after the step that it is at, and has the grace to save it. Nobody
    asked for less, and what an attempt has not trained itself was saved by those before it.
    """
    if not course.stops or not all(stop.save for stop in course.stops) or course.row["status"] != "cancelled":
        return
    attempt, asked = course.row["attempt"], course.row["stop_requested_at"]
    begins = [move.ts for move in course.moves if move.target == "running" and move.attempt == attempt]
    steps, end = course.steps_of(attempt), course.end_of(attempt)
    if not asked or not begins or not steps or not end or end.reason != "stopped on request":
        return
    if not begins[0] < asked.timestamp() < end.ts:
        return
    if is_disturbed(history, course, attempt, asked.timestamp(), end.ts):
        return
    saved = {row["step"] for row in course.checkpoints if row["deleted_at"] is None}
    if steps[-1] not in saved:
        yield course.broke(9, f"stopped at step {steps[-1]}, which was to be saved; its checkpoints: {sorted(saved)}")


def ended_in_good_order(course: Course, attempt: int) -> bool:
    """Whether the trainer came to its end, and its worker lived to tell."""
    end = course.end_of(attempt)
    if end is None or course.outcome_of(attempt) not in ("stopped", "completed"):
        return False
    by_its_worker = end.target in ("completed", "cancelled", "pending") and "lost" not in end.reason
    return by_its_worker and (end.target != "pending" or end.reason.startswith("released"))


def _end_of_run(course: Course) -> float:
    return course.moves[-1].ts if course.moves else 0.0


def phase_at(course: Course, stop: StopCall) -> str:
    """What the run was at when the stop came."""
    asked = course.row["stop_requested_at"]
    before = [move.target for move in course.moves if asked and move.ts <= asked.timestamp()]
    return before[-1] if before else "pending"
