"""Promises about how runs change hands and end: 2, 13 to 16 and 18 to 20."""

from collections.abc import Iterator

from tests.chaos.causes import a_clock_was_wrong, is_explained, over_at, worker_of
from tests.chaos.course import COUNTED, Course, ancestors
from tests.chaos.history import History, Violation

CODES = {
    "out_of_memory", "non_finite_loss", "bad_data", "model_not_found", "disk_full", "time_limit", "worker_lost",
    "trainer_crashed", "config_error", "internal",
}  # fmt: skip
_SAYS_DISK = ("space", "room", "disk")
_NO_SPACE = "No space left"


def no_run_is_lost(history: History, course: Course) -> Iterator[Violation]:
    """2. Every run has ended, and one that had to complete did, unless a stop or a fault explains what it did instead.

    Sound: the campaign heals everything and waits before it looks. The codes that a fault can explain are judged by
    promises 13 and 14; of the others none may come of what the suite does, but one: a checkpoint that it damaged
    between the worker's look at it and the trainer's, or all of those that the run was to resume.
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
    """13. A full disk, and nothing else, ends a run with `disk_full` and a message that says what to do.

    Sound: a storage that is not full refuses no write, what it refused is told as soon as the database takes it, and
    the kernel's words for it are always the same. They may stand among the last lines of a trainer that ended without
    a word, whose end they do not explain.
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
        yield course.broke(13, f"the message does not speak of the disk: {message!r}")
    elif code not in (None, "disk_full", "trainer_crashed", "out_of_memory") and _NO_SPACE in message:
        yield course.broke(13, f"failed with {code} because of a full disk: {message}")


def failures_are_classified(history: History, course: Course) -> Iterator[Violation]:
    """14. An error code is one of the list and the right one: for the profile, or for what was done to the run.

    Sound: a profile that is made to fail does so in every attempt. A trainer dies without a word only if the suite
    killed it, and the suite knows whom. `worker_lost` needs more losses than `max_restarts` since the last new
    checkpoint, which the log tells in the order in which they were counted.
    """
    code = course.row["error_code"]
    made_to = course.profile.must_fail_with if course.profile else None
    if code is None:
        if made_to and course.row["status"] == "completed":
            yield course.broke(14, f"completed, although made to fail with {made_to}")
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
        if not _trainer_was_killed(history, course):
            yield course.broke(14, f"nobody killed its trainer: {course.row['error_message']}")
    elif made_to and code != "disk_full":
        yield course.broke(14, f"failed with {code} instead of {made_to}: {course.row['error_message']}")


def _trainer_was_killed(history: History, course: Course) -> bool:
    pid = course.pid_of(course.row["attempt"])
    if pid is not None:
        return pid in history.killed_trainers
    # It died before it could write down that it lives: one of those that were killed and never seen.
    seen = {line["pid"] for journal in history.journals.values() for line in journal}
    return bool(history.killed_trainers - seen)


def alive_means_progress(history: History, course: Course) -> Iterator[Violation]:
    """15. A trainer that hangs is found by the service, and its attempt ended.

    Sound: such a run is made to hang at a step that it never ends, so without the watch its lease is renewed for
    ever; a stop would end it too, and the suite must not have killed it itself, else this proves nothing.
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
    """16. No run is taken up again after more than `max_restarts` losses without a new checkpoint in between.

    Sound: the count is raised under the row lock with the move that is told, and set back in the transaction of the
    checkpoint's event, so the log has both in the order in which they happened.
    """
    for loss in course.losses:
        if loss.how in COUNTED and loss.move.target == "pending" and loss.before >= course.row["max_restarts"]:
            yield course.broke(16, f"taken up again after {loss.before + 1} losses of {course.row['max_restarts']}")


def requeues_are_explained(history: History, course: Course) -> Iterator[Violation]:
    """18, 19, 20. A run changes hands only because of a fault that may cause it; not because a clock jumped.

    Sound: what may cost a run is written down by the suite, with what it was done to, and costs runs of that worker
    (of every worker, if it was Postgres or the network) within the leases that have to run out, plus one of grace
    after Postgres was down. A trainer that hangs is a cause of its own. Handed back is for 18, lost and retried for
    19, and either for 20 while a clock was wrong. The database's own clock never goes back.
    """
    for loss in course.losses:
        if course.hung_in(loss.move.attempt) or is_explained(history, course, loss):
            continue
        worker = worker_of(history, course, loss.move.attempt)
        how = f"attempt {loss.move.attempt} on {worker} was {loss.how} without a cause: {loss.move.reason}"
        while_a_clock_was_wrong = a_clock_was_wrong(history, loss.move.ts)
        yield course.broke(20 if while_a_clock_was_wrong else 18 if loss.how == "handed_back" else 19, how)
    for before, after in zip(course.moves, course.moves[1:], strict=False):
        if after.ts < before.ts - 1:
            yield course.broke(20, f"event {after.seq} is {before.ts - after.ts:.1f} s older than event {before.seq}")
