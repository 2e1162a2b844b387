"""Promises about the training itself, based on the trainers' journal: 3 and 10 to 12."""

from collections.abc import Iterator, Sequence

from tests.chaos.causes import over_at, place, worker_of
from tests.chaos.course import Course, ancestors, candidates, resumed_checkpoint
from tests.chaos.history import History, Profile, Row, Violation

_CLOCKS_DIFFER_BY = 0.2
"""Seconds by which the wall clock may have been adjusted during a campaign."""


def one_trainer_at_a_time(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 3: no attempt writes to the journal after the next one started, and each is one process.

    Sound: every line is one append to one file, so the order of the file is the order of the writes, and a trainer's
    first line is its start. Within a boot the clock (boot time, taken before each write) agrees with that order. Only
    leases separate attempts, because the second worker starts trainers without the file lock of a run. So a trainer has
    stopped writing when the database finds its lease expired, a third of the lease after the trainer's deadline. A
    trainer with only its first line may have died with its zygote before the worker noticed; the worker then forks it
    again.
    """
    latest: Row | None = None
    first_of: dict[int, Row] = {}
    stopped: set[int] = set()
    for line in course.journal:
        attempt = line["attempt"]
        first = first_of.setdefault(attempt, line)
        if line["event"] == "start" and latest is first and _was_forked_again(history, course, line):
            first = first_of[attempt] = line
        if not 1 <= attempt <= course.row["attempt"]:
            yield course.broke(3, f"a trainer ran as attempt {attempt}, the run counts {course.row['attempt']}")
        if latest is not None and attempt < latest["attempt"]:
            yield course.broke(3, f"attempt {attempt} wrote {line['event']} after attempt {latest['attempt']} began")
        if latest is not None and line["boot_id"] == latest["boot_id"] and line["t"] < latest["t"]:
            yield course.broke(3, f"a line of attempt {attempt} is older than the one of {latest['attempt']} before it")
        if (line["pid"], line["boot_id"]) != (first["pid"], first["boot_id"]):
            yield course.broke(3, f"attempt {attempt} ran as process {first['pid']} and as {line['pid']}")
        # On a full disk the first line may be missing, and only the failure is in the journal.
        refused = line is first and line["event"] == "stop" and line["outcome"] == "failed"
        if (line["event"] == "start") != (line is first) and not refused:
            yield course.broke(3, f"attempt {attempt} began with {first['event']}, and wrote {line['event']}")
        if attempt in stopped:
            yield course.broke(3, f"attempt {attempt} wrote {line['event']} after its stop")
        if line["event"] == "stop":
            stopped.add(attempt)
        latest = line if latest is None or attempt >= latest["attempt"] else latest
    for loss in course.losses:
        last = course.lines_of(loss.move.attempt)[-1:]
        late = last[0]["t"] + history.booted - loss.move.ts if last else 0.0
        if "its lease ran out" in loss.move.reason and late > _CLOCKS_DIFFER_BY:
            yield course.broke(3, f"attempt {loss.move.attempt} wrote {late:.1f} s after its lease had run out")
    for attempt in first_of:
        steps = course.steps_of(attempt)
        if steps and steps != list(range(steps[0], steps[0] + len(steps))):
            yield course.broke(3, f"the steps of attempt {attempt} do not follow one another: {steps}")


def _was_forked_again(history: History, course: Course, line: Row) -> bool:
    when, worker = line["t"] + history.booted, worker_of(history, course, line["attempt"])
    return any(
        place(fault) == worker and fault.began - _CLOCKS_DIFFER_BY <= when <= over_at(fault, history.lease_seconds)
        for fault in history.faults
    )


def resume_is_exact(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 10: every trained step has the loss and the samples of a run without faults.

    Sound: the profiles are deterministic, and a loss depends on all previous steps, so it also detects a resume from
    the wrong state. A completed run and the runs that it resumes trained every step, and its output equals that of the
    run without faults.
    """
    profile = course.profile
    if profile is None or not profile.losses:
        return
    for line in course.journal:
        if line["event"] != "step":
            continue
        step, where = line["step"], f"step {line['step']} of attempt {line['attempt']}"
        if line["loss_hex"] != profile.losses.get(step):
            yield course.broke(10, f"{where}: loss {line['loss_hex']} instead of {profile.losses.get(step)}")
        if tuple(line["samples"]) != tuple(profile.samples.get(step, ())):
            yield course.broke(10, f"{where}: samples {line['samples']} instead of {profile.samples.get(step)}")
    if course.options is not None:
        for event in course.events:
            if event.type == "metric":
                loss = profile.losses.get(event.data["step"])
                if loss == "nan" and event.data["loss"] is None:
                    continue
                if loss is None or event.data["loss"] != float.fromhex(loss):
                    yield course.broke(10, f"event {event.seq} has loss {event.data['loss']} instead of {loss}")
    if course.row["status"] == "completed":
        yield from _completed_wrongly(history, course, profile)


def _completed_wrongly(history: History, course: Course, profile: Profile) -> Iterator[Violation]:
    family = (course.run_id, *ancestors(history, course.row))
    journals = (history.journals.get(run_id, ()) for run_id in family)
    trained = {line["step"] for journal in journals for line in journal if line["event"] == "step"}
    missing = [step for step in range(1, profile.steps + 1) if step not in trained]
    last = course.row["attempt"]
    reached = max(course.steps_of(last), default=course.start_of(last) or 0)
    if missing or reached != profile.steps:
        yield course.broke(10, f"completed at step {reached} of {profile.steps}, never trained: {missing}")
    if profile.output is not None and history.outputs.get(course.run_id) != profile.output:
        yield course.broke(10, f"its output is {history.outputs.get(course.run_id)} instead of {profile.output}")


def torn_checkpoints_are_never_resumed(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 11: every attempt resumes from the last valid checkpoint; only the suite corrupts checkpoints.

    Sound: a row is inserted after its folder was fsynced and renamed, only by the owner of the claim, so the next
    attempt sees all rows of earlier ones. A checkpoint that is bad at the end may have been valid at an earlier claim,
    so it may be used or skipped; the first one that is not bad must be used. A corrupt one must not be used by an
    attempt that was claimed after the corruption, if the record of the fault names the checkpoint.
    """
    for attempt in range(1, course.row["attempt"] + 1):
        start = course.start_of(attempt)
        if start is None:
            continue
        seen = list(candidates(history, course, attempt))
        possible = _possible_starts(seen, course)
        if start not in possible:
            yield course.broke(11, f"attempt {attempt} began at step {start}, whole checkpoints: {sorted(possible)}")
        whole = [row for row in seen if row["step"] == start and not _was_damaged_before(history, course, attempt, row)]
        if start > 0 and start in possible and not whole:
            yield course.broke(11, f"attempt {attempt} began at step {start}, whose checkpoint had been damaged before")
        reported = next((row["start_step"] for row in course.attempts if row["attempt"] == attempt), None)
        if reported is not None and reported != start:
            yield course.broke(11, f"attempt {attempt} is recorded to start at step {reported}, but started at {start}")
    saved = {(line["attempt"], line["step"]) for line in course.journal if line["event"] == "save"}
    for row in course.checkpoints:
        if row["id"] in history.broken and row["id"] not in history.damaged:
            yield course.broke(11, f"checkpoint {row['id']} is broken: {'; '.join(history.broken[row['id']])}")
        if row["bad_reason"] is not None and row["id"] not in history.damaged:
            yield course.broke(11, f"checkpoint {row['id']} was found to be bad: {row['bad_reason']}")
        if (row["attempt"], row["step"]) not in saved:
            yield course.broke(11, f"checkpoint {row['id']} has a row, but its trainer had not finished saving it")


def _possible_starts(seen: Sequence[Row], course: Course) -> set[int]:
    possible: set[int] = set()
    for row in seen:
        possible.add(row["step"])
        if row["bad_reason"] is None:
            return possible
    # Without a valid checkpoint a run restarts from step 0, unless it was created to resume from one.
    return possible if course.row["resume_checkpoint_id"] else {*possible, 0}


def _was_damaged_before(history: History, course: Course, attempt: int, row: Row) -> bool:
    claim = course.claim_of(attempt)
    return row["id"] in history.damaged and any(
        row["id"] in fault.target and claim is not None and fault.ended < claim.ts for fault in history.faults
    )


def clean_up_keeps_what_is_needed(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 12: the newest, the best, pinned and resumed checkpoints are not deleted.

    Sound: pruning chooses among existing rows that are not bad. A checkpoint that was marked bad later may have been
    the newest or the best at that time, so deleting a valid one that is earlier (or worse) is then allowed. Of several
    checkpoints at the same step one is enough.
    """
    whole = [row for row in course.checkpoints if row["bad_reason"] is None]
    bad = [row for row in course.checkpoints if row["bad_reason"] is not None]
    evaluated = [row for row in whole if row["metrics"].get("eval_loss") is not None]
    if whole:
        newest = max(row["step"] for row in whole)
        excused = any(row["step"] >= newest for row in bad)
        if not excused and all(row["deleted_at"] for row in whole if row["step"] == newest):
            yield course.broke(12, f"its newest whole checkpoint, of step {newest}, was deleted")
    if evaluated:
        best = min(_badness(row) for row in evaluated)
        excused = any(row["metrics"].get("eval_loss") is not None and _badness(row) <= best for row in bad)
        if not excused and all(row["deleted_at"] for row in evaluated if _badness(row) == best):
            yield course.broke(12, f"its best checkpoint, of step {best[1]}, was deleted")
    for row in course.checkpoints:
        if row["pinned"] and row["deleted_at"]:
            yield course.broke(12, f"checkpoint {row['id']} is pinned, and was deleted")
    resumed = resumed_checkpoint(history, course.row)
    if resumed is not None and resumed["deleted_at"]:
        yield course.broke(12, f"checkpoint {resumed['id']}, which it resumes, was deleted")


def _badness(row: Row) -> tuple[float, int]:
    return row["metrics"]["eval_loss"], row["step"]
