"""Promises about stored runs and events: 1, 4 to 7, and 17 and 18 for readers."""

from collections import Counter
from collections.abc import Iterator, Mapping

from anneal.contracts.field_types import format_timestamp
from anneal.contracts.run_status import TERMINAL
from tests.chaos.course import REPAIRED, REQUEUES, WRITTEN_BY_LIFECYCLE, Course, first_difference, is_prefix
from tests.chaos.history import Event, History, Transcript, Violation

_FOLLOWING: Mapping[str | None, tuple[str, ...]] = {
    None: ("pending",),
    "pending": ("initializing", "cancelled"),
    "initializing": ("running", "pending", *TERMINAL),
    "running": ("checkpointing", "pending", *TERMINAL),
    "checkpointing": ("running", "pending", *TERMINAL),
}


def accepted_is_durable(history: History) -> Iterator[Violation]:
    """Check promise 1: every creation with a 2xx response exists, with one id per key.

    Sound: the response is sent after the commit, so the run survives any crash. A key is unique in the database, so
    there is at most one run however many responses were lost; a creation without a response may have one. Clients
    record a key before its first request, and always send one.
    """
    runs_of_key = Counter(row["idempotency_key"] for row in history.runs.values() if row["idempotency_key"])
    key_of_answer: dict[str, str] = {}
    for creation in history.creations:
        for answer in dict.fromkeys(creation.answers):
            if answer not in history.runs:
                yield Violation(1, answer, f"was answered to {creation.key}, but does not exist")
                continue
            row = history.runs[answer]
            if row["idempotency_key"] != creation.key:
                yield Violation(1, answer, f"was answered to {creation.key}, but made by {row['idempotency_key']}")
            if creation.parent is not None and row["parent_run_id"] != creation.parent:
                yield Violation(1, answer, f"was to resume {creation.parent}, and resumes {row['parent_run_id']}")
            if key_of_answer.setdefault(answer, creation.key) != creation.key:
                yield Violation(1, answer, f"was answered to {key_of_answer[answer]} and to {creation.key}")
        if len(set(creation.answers)) > 1:
            yield Violation(1, creation.answers[0], f"{creation.key} was answered as {sorted(set(creation.answers))}")
    keys = {creation.key for creation in history.creations}
    for run_id, row in history.runs.items():
        if row["idempotency_key"] not in keys:
            yield Violation(1, run_id, f"no client created it: its key is {row['idempotency_key']}")
    for key, count in runs_of_key.items():
        if count > 1:
            twins = sorted(run_id for run_id, row in history.runs.items() if row["idempotency_key"] == key)
            yield Violation(1, twins[0], f"{count} runs for the key {key}: {twins}")


def stale_writers_write_nothing(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 4: events of an attempt are between its claim and its end, and none follows the run's end.

    Sound: claim, end and each append hold the run's row lock when they take their `seq`, so `seq` is the order of the
    commits, and a late append of an ended attempt finds another lease epoch.
    """
    latest = 0
    over = False
    for event in course.events:
        if event.attempt < latest:
            yield course.broke(4, f"event {event.seq} is of attempt {event.attempt}, behind one of attempt {latest}")
        latest = max(latest, event.attempt)
        if over and event.type != "end":
            yield course.broke(4, f"event {event.seq} ({event.type}) comes after the end")
        over = over or event.type == "end"
    yield from _writes_outside_of_attempts(course)
    yield from _checkpoints_without_event(course)
    output = course.row["output_attempt"]
    if output is not None and output != course.row["attempt"]:
        yield course.broke(4, f"its output is of attempt {output}, the last attempt is {course.row['attempt']}")


def _writes_outside_of_attempts(course: Course) -> Iterator[Violation]:
    for attempt in sorted({event.attempt for event in course.events if event.type not in WRITTEN_BY_LIFECYCLE}):
        claim, end = course.claim_of(attempt), course.end_of(attempt)
        if claim is None:
            yield course.broke(4, f"attempt {attempt} wrote events, but was never claimed")
            continue
        for event in course.of_trainer(attempt):
            if event.seq < claim.seq or (end and event.seq > end.seq):
                yield course.broke(4, f"event {event.seq} ({event.type}) is outside of its attempt {attempt}")


def _checkpoints_without_event(course: Course) -> Iterator[Violation]:
    reported = Counter(
        (event.data["checkpoint_id"], event.attempt, event.data["step"], event.data["kind"], event.data["bytes"])
        for event in course.events
        if event.type == "checkpoint"
    )
    stored = Counter((row["id"], row["attempt"], row["step"], row["kind"], row["bytes"]) for row in course.checkpoints)
    for checkpoint in (reported - stored).keys() | (stored - reported).keys():
        where = "no row" if checkpoint in reported - stored else "no event"
        yield course.broke(
            4, f"checkpoint {checkpoint[0]} of step {checkpoint[2]}, attempt {checkpoint[1]}, has {where}"
        )
    for (attempt, step), count in Counter((row["attempt"], row["step"]) for row in course.checkpoints).items():
        if count > 1:
            yield course.broke(4, f"{count} checkpoints of attempt {attempt} for step {step}")


def events_are_whole(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 5: `seq` counts 1, 2, 3 … up to the run's counter.

    Sound: nothing else increments the counter, the rows are inserted in the same transaction, and the history is
    collected after everything has ended.
    """
    seqs = [event.seq for event in course.events]
    whole = list(range(course.row["first_seq"], course.row["event_seq"] + 1))
    if seqs != whole:
        if len(seqs) == len(whole) or is_prefix(seqs, whole) or is_prefix(whole, seqs):
            yield course.broke(5, f"{len(seqs)} events up to {seqs[-1:]}, the counter says {course.row['event_seq']}")
        else:
            yield course.broke(5, f"the numbers of its events have a gap: {first_difference(seqs, whole)}")


def readers_see_every_event_once(history: History, transcript: Transcript) -> Iterator[Violation]:
    """Check promises 5, 17, 18: every reader received all stored events once, in order, as stored.

    Sound: committed events never change, and a reader that was cut off continues after the last id it received. It
    ends early only if it gave up: a reader that was never cut off was then blocked (17), the others were not resumed
    (18).
    """
    run_id = transcript.run_id
    stored = {event.seq: event for event in history.events.get(run_id, ())}
    ids = [number for number, _, _ in transcript.received]
    if ids != list(range(1, len(ids) + 1)):
        whole = range(1, len(ids) + 1)
        yield Violation(5, run_id, f"a reader received the ids {first_difference(ids, whole)}")
    for number, kind, data in transcript.received:
        event = stored.get(number)
        if event is None:
            yield Violation(5, run_id, f"a reader received event {number}, which is not stored")
        elif (kind, dict(data)) != (event.type, on_the_wire(run_id, event)):
            yield Violation(5, run_id, f"a reader received event {number} as {kind} {data}, stored is {event}")
    if transcript.ended and transcript.received[-1][1] != "end":
        yield Violation(5, run_id, "a reader received something after the end")
    has_ended = run_id in history.runs and history.runs[run_id]["status"] in TERMINAL
    if has_ended and not transcript.ended:
        last = f"the last of {len(ids)} events after {transcript.connections} connections is no end"
        promise = 18 if transcript.connections > 1 else 17
        yield Violation(promise, run_id, f"a reader never came to the end: {last}")


def on_the_wire(run_id: str, event: Event) -> dict[str, object]:
    """Return a stored event as readers receive it, see `app.runs.events.log.event_json`."""
    return {"run_id": run_id, "seq": event.seq, "ts": format_timestamp(event.ts), **event.data}


def hints_do_no_harm(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 6: one claim per attempt, numbered 1, 2, 3 …, each with a row and its own lease epoch.

    Sound: a claim increments the attempt and inserts its row and event in one statement; a duplicate or late hint
    finds nothing to claim and has no effect.
    """
    numbers = list(range(1, course.row["attempt"] + 1))
    claims = [move.attempt for move in course.moves if move.target == "initializing"]
    if claims != numbers:
        yield course.broke(6, f"claimed as attempts {claims}, the run counts {course.row['attempt']}")
    rows = [row["attempt"] for row in course.attempts]
    if rows != numbers:
        yield course.broke(6, f"rows for the attempts {rows}, the run counts {course.row['attempt']}")
    epochs = [row["lease_epoch"] for row in course.attempts]
    if epochs != sorted(set(epochs)) or (epochs and epochs[-1] > course.row["lease_epoch"]):
        yield course.broke(
            6, f"the epochs of its attempts are {epochs}, that of the run is {course.row['lease_epoch']}"
        )


def ambiguous_commits_are_safe(history: History, course: Course) -> Iterator[Violation]:
    """Check promise 7: each status change and each trainer event is stored once, without gaps.

    Sound: a commit whose response was lost is retried with the same numbers and finds what it stored. Trainer events
    are compared with the journal, which is written first. Events lost with a worker are missing only at the end of an
    attempt (promise 9 says when not even there), and dropped log lines are reported.
    """
    yield from _doubled_or_missing_moves(course)
    for row in course.attempts:
        attempt = row["attempt"]
        yield from _doubled_or_missing_words(course, attempt)
        end = course.end_of(attempt)
        requeued = (*REQUEUES, REPAIRED)
        if end and not (row["outcome"] == end.target or (end.target == "pending" and row["outcome"] in requeued)):
            yield course.broke(7, f"attempt {attempt} ended as {row['outcome']}, the run went to {end.target}")
    # Lines of another host are stored by its worker, which counts none: only the lead sends its events again.
    own = [event for event in course.of_trainer(course.row["attempt"]) if not _is_of_another_host(course, event)]
    said = len(own) if course.row["attempt"] else 0
    if course.row["attempt_event_count"] != said:
        yield course.broke(
            7, f"{course.row['attempt_event_count']} events of the last attempt are counted, {said} are stored"
        )


def _is_of_another_host(course: Course, event: Event) -> bool:
    is_line = event.type == "log" and str(event.data["line"]).startswith("[rank ")
    return is_line and course.row.get("hosts_needed", 1) > 1


def _doubled_or_missing_moves(course: Course) -> Iterator[Violation]:
    at: str | None = None
    for move in course.moves:
        if move.source != at:
            yield course.broke(7, f"event {move.seq} moves it from {move.source}, but it was {at}")
        elif move.target not in _FOLLOWING.get(at, ()):
            yield course.broke(7, f"event {move.seq} moves it from {at} to {move.target}")
        at = move.target
    if at != course.row["status"]:
        yield course.broke(7, f"its events end at {at}, it is {course.row['status']}")
    ends = [event for event in course.events if event.type == "end"]
    if len(ends) != int(course.has_ended) or any(event.data.get("status") != at for event in ends):
        yield course.broke(7, f"{len(ends)} end events for a run that is {course.row['status']}")
    reported = [(event.data.get("code"), event.data.get("message")) for event in course.events if event.type == "error"]
    expected = [(course.row["error_code"], course.row["error_message"])] if course.row["status"] == "failed" else []
    if reported != expected:
        yield course.broke(7, f"its errors are {reported}, the run's is {expected}")


def _doubled_or_missing_words(course: Course, attempt: int) -> Iterator[Violation]:
    printed, dropped = course.printed_by(attempt)
    for what, stored, said in (
        ("lines", printed, course.to_be_printed(attempt)),
        ("metrics", course.measured_by(attempt), course.to_be_measured(attempt)),
    ):
        if said is None:
            continue
        if what == "lines" and dropped:
            whole = stored == sorted(stored) and not Counter(stored) - Counter(said)
        else:
            whole = is_prefix(stored, said)
        if not whole:
            yield course.broke(7, f"attempt {attempt} stored {what} of steps {first_difference(stored, said)}")
