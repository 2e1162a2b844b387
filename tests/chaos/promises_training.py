"""Promises about the training itself, on the word of the trainers' own journal: 3 and 10 to 12."""

from collections.abc import Iterator, Sequence

from tests.chaos.causes import over_at, place, worker_of
from tests.chaos.course import Course, ancestors, candidates, resumed_checkpoint
from tests.chaos.history import History, Profile, Row, Violation

_CLOCKS_DIFFER_BY = 0.2
"""Seconds by which the time of day may have been set while a campaign ran."""


def one_trainer_at_a_time(history: History, course: Course) -> Iterator[Violation]:
    """3. In the order of the journal no attempt writes after the next one has begun, and each is one process.

    Sound: every line is one append to one file, so the order of the file is the order of the writes, and a trainer's
    first line is its start. Within a boot the clock (boot time, taken before each write) agrees with that order.
    Leases are what keeps them apart: the runs of the second worker are started without the lock on a run. So a trainer
    is silent when the database finds that its lease has run out, a third of the lease after its deadline.
    A trainer that got no further than its first line may have died with the zygote that forked it, before the worker
    heard of it: the worker then has it forked once more.
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
        # A full disk may have refused the first line, and the process says nothing but that it failed.
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
    """10. Every step that anybody ever trained has the loss and the samples of an undisturbed run.

    Sound: the profiles are deterministic, and a loss depends on all steps before it, so it also tells of a resume from
    the wrong state. A run that was completed has trained every step, itself or through those that it resumes, and
    its output is that of the undisturbed run.
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
                    yield course.broke(10, f"event {event.seq} tells the loss {event.data['loss']} instead of {loss}")
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
    """11. Every attempt takes up the run at its furthest whole checkpoint; only what the suite damaged is not whole.

    Sound: a row is inserted after its folder was fsynced and renamed, by the claim's holder only, so all rows of
    earlier attempts are seen by the next. One that is bad at the end may have been whole at an earlier claim, so it
    may be taken or passed over; the first that is not bad must be taken. A damaged one must not be taken by an attempt
    that was claimed after the damage, where the record of the fault names the checkpoint.
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
        told = next((row["start_step"] for row in course.attempts if row["attempt"] == attempt), None)
        if told is not None and told != start:
            yield course.broke(11, f"attempt {attempt} was to begin at step {told} and began at {start}")
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
    # Without any whole checkpoint a run begins anew, unless it was asked to go on from one.
    return possible if course.row["resume_checkpoint_id"] else {*possible, 0}


def _was_damaged_before(history: History, course: Course, attempt: int, row: Row) -> bool:
    claim = course.claim_of(attempt)
    return row["id"] in history.damaged and any(
        row["id"] in fault.target and claim is not None and fault.ended < claim.ts for fault in history.faults
    )


def clean_up_keeps_what_is_needed(history: History, course: Course) -> Iterator[Violation]:
    """12. The newest and the best whole checkpoint, pinned ones and those that another run resumes are not deleted.

    Sound: clean-up decides among the rows that are there and not bad. One that turned out to be bad later may have
    been the newest or the best then, so what was deleted beside a bad one that was further (or better) is not held
    against it. Among several of the same step one is enough.
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
