"""Promises about requeued and ended runs: 2, 13 to 16 and 18 to 20."""

from collections.abc import Iterator

from tests.chaos.causes import a_clock_was_wrong, is_explained, made_room, over_at, worker_of
from tests.chaos.course import COUNTED, Course, ancestors
from tests.chaos.history import History, Violation

CODES = {
    "out_of_memory", "non_finite_loss", "bad_data", "model_not_found", "disk_full", "worker_lost",
    "device_error", "trainer_crashed", "config_error", "internal",
}  # fmt: skip
_SAYS_DISK = ("space", "room", "disk")
_NO_SPACE = "No space left"


def no_run_is_lost(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 2: every run has ended, and completed unless a stop or a fault explains otherwise.

    Sound: the campaign reverts all faults and waits before it checks. Codes that a fault can explain are checked by
    promises 13 and 14; the suite causes no other, with one exception: it may corrupt a checkpoint between the checks of
    the worker and of the trainer, or all checkpoints from which the run could resume.
    """
    if not course.has_ended:
        if not course.hangs:
            yield course.broke(2, f"it is still {course.row['status']}")
        return
    code, message = course.row["error_code"], course.row["error_message"] or ""
    judged_elsewhere = code in ("worker_lost", "trainer_crashed", "disk_full") or _NO_SPACE in message
    if course.must_complete and code in CODES and not judged_elsewhere and not _lost_its_checkpoint(history, course):
        yield course.broke(2, f"failed with {code}: {message}")


def _lost_its_checkpoint(history: History, course: Course) -> bool:
    family = (course.run_id, *ancestors(history, course.row))
    damaged = any(row["id"] in history.damaged for run_id in family for row in history.checkpoints.get(run_id, ()))
    return damaged and "whole" in (course.row["error_message"] or "")


def disk_full_is_said(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 13: only a full disk ends a run with `disk_full` and a message that says what to do.

    Sound: a storage with free space rejects no write, an error is stored as soon as the database is reachable, and the
    kernel's message is always the same. It may also be among the last lines of a trainer that crashed for another
    reason.
    """
    code, message = course.row["error_code"], course.row["error_message"] or ""
    if course.profile is not None and course.profile.must_fail_with == "disk_full":
        return
    when = course.moves[-1].ts if course.moves else 0.0
    was_full = any(
        fault.kind == "disk_full" and fault.began <= when <= over_at(fault, history.lease_seconds)
        for fault in history.faults
    )
    if code == "disk_full" and not was_full:
        yield course.broke(13, f"failed with disk_full on a disk that was not: {message}")
    elif code == "disk_full" and not any(word in message.lower() for word in _SAYS_DISK):
        yield course.broke(13, f"the message does not mention the disk: {message!r}")
    elif code not in (None, "disk_full", "trainer_crashed", "out_of_memory") and _NO_SPACE in message:
        yield course.broke(13, f"failed with {code} because of a full disk: {message}")


def failures_are_classified(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 14: the error code is a known one and matches the profile or the injected fault.

    Sound: a profile that fails on purpose does so in every attempt. A trainer dies without a record only if the suite
    killed it, and the suite records its process id. `worker_lost` needs more losses than `max_restarts` since the last
    new checkpoint, which the event log has in the order in which they were counted.
    """
    code = course.row["error_code"]
    made_to = course.profile.must_fail_with if course.profile else None
    if code is None:
        if made_to and course.row["status"] == "completed":
            yield course.broke(14, f"completed, but should have failed with {made_to}")
        return
    if code not in CODES:
        yield course.broke(14, f"failed with an unknown code {code}")
    elif code == made_to:
        return
    elif code == "worker_lost":
        before = [loss.before for loss in course.losses if loss.move.target == "failed" and loss.how in COUNTED]
        if not any(count >= course.row["max_restarts"] for count in before):
            yield course.broke(14, f"failed as lost after {before} earlier losses of {course.row['max_restarts']}")
    elif code == "trainer_crashed":
        if not _trainer_was_killed(history, course, course.row["attempt"]):
            yield course.broke(14, f"the suite did not kill its trainer: {course.row['error_message']}")
    elif made_to and code != "disk_full":
        yield course.broke(14, f"failed with {code} instead of {made_to}: {course.row['error_message']}")


def _trainer_was_killed(history: History, course: Course, attempt: int) -> bool:
    pid = course.pid_of(attempt)
    if pid is not None:
        return pid in history.killed_trainers
    # It died before its first journal line, so it must be a killed trainer that is in no journal.
    seen = {line["pid"] for journal in history.journals.values() for line in journal}
    return bool(history.killed_trainers - seen)


def alive_means_progress(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 15: the service detects a hanging trainer and ends its attempt.

    Sound: such a run hangs at a step, so without hang detection its lease is renewed forever; a stop would also end
    it. If the suite had killed it, the check would prove nothing.
    """
    if not course.hangs:
        return
    if not course.has_ended:
        yield course.broke(15, f"its trainer hangs and it is still {course.row['status']}")
    elif course.row["status"] == "completed" and course.options and course.options.faults_until_attempt is None:
        yield course.broke(15, "its trainer hangs in every attempt, and it completed")
    for row in course.attempts:
        if course.hung_in(row["attempt"]) and course.pid_of(row["attempt"]) in history.killed_trainers:
            yield course.broke(15, f"the suite itself killed the hanging trainer of attempt {row['attempt']}")


def poison_runs_do_not_loop(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 16: no run is requeued after more than `max_restarts` losses without a new checkpoint.

    Sound: the count is incremented under the row lock together with the status event, and reset in the transaction of
    the checkpoint's event, so the event log has both in order.
    """
    for loss in course.losses:
        if loss.how in COUNTED and loss.move.target == "pending" and loss.before >= course.row["max_restarts"]:
            yield course.broke(
                16, f"requeued after {loss.before + 1} losses, max_restarts is {course.row['max_restarts']}"
            )


def requeues_are_explained(history: History, course: Course) -> Iterator[Violation]:
    """Check promises 18, 19, 20: a run is requeued only because of a fault that may cause it, not by a clock jump.

    Sound: the suite records each fault with its target; it affects runs of that worker (of every worker for PostgreSQL
    or the network) within the leases that have to expire, plus one of grace after an outage of PostgreSQL. A trainer
    that hangs, was killed or crashes on purpose is a separate cause, and so is a run of higher priority that waited.
    Released runs count for 18, lost and retried ones for 19, and all of them for 20 while a clock was wrong. The
    database's own clock never goes back.
    """
    for loss in course.losses:
        if course.hung_in(loss.move.attempt) or is_explained(history, course, loss) or made_room(history, course, loss):
            continue
        crashes = course.profile is not None and course.profile.must_fail_with == "trainer_crashed"
        if loss.how == "retried" and (crashes or _trainer_was_killed(history, course, loss.move.attempt)):
            continue
        worker = worker_of(history, course, loss.move.attempt)
        how = f"attempt {loss.move.attempt} on {worker} was {loss.how} without a cause: {loss.move.reason}"
        while_a_clock_was_wrong = a_clock_was_wrong(history, loss.move.ts)
        yield course.broke(20 if while_a_clock_was_wrong else 18 if loss.how == "handed_back" else 19, how)
    for before, after in zip(course.moves, course.moves[1:], strict=False):
        if after.ts < before.ts - 1:
            yield course.broke(20, f"event {after.seq} is {before.ts - after.ts:.1f} s older than event {before.seq}")
