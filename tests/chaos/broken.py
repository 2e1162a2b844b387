"""Histories with one error each, and the promise that it breaks."""

from dataclasses import replace
from typing import Any

from tests.chaos.causes import SLACK
from tests.chaos.history import Creation, FaultRecord, Growth, History
from tests.chaos.spoiling import (
    Spoil,
    attempt,
    becomes,
    checkpoint,
    event_added,
    event_changed,
    event_doubled,
    event_removed,
    events,
    fault_added,
    is_end,
    journal,
    line,
    line_added,
    line_removed,
    measures,
    prints,
    reader,
    row,
    run_added,
    saves,
    together,
    whole,
)  # fmt: skip
from tests.chaos.synthetic import LOSSES, OUTPUT, SAMPLES, Story, moment

LATE = 2_000_000.0
"""Unix time long after every fault of the correct history."""


def waiting(**values: Any) -> Story:
    return Story("odd", began=LATE, **values)


def training(steps: int = 3, profile: str = "plain", **values: Any) -> Story:
    return waiting(profile=profile, **values).claimed().begins().trains(steps)


def preempted(above: str, priority: int) -> Spoil:
    """Add a run that makes room for another one, which has this priority."""
    story = training(5).saves("stop")
    story._write(event="stop", outcome="stopped")
    reason = f"preempted for run {above}, which has a higher priority"
    waited = Story("above", began=LATE + 0.5, priority=priority).claimed().begins().completes()
    made_room = story.requeued("handed_back", reason).claimed().begins(5).completes()
    return together(run_added(made_room), run_added(waited))


def forked_twice() -> Spoil:
    """Add a run whose journal starts with a process that wrote one line; another process trains the attempt."""
    story = waiting().claimed()
    story._write(event="start", pid=4711)
    return run_added(story.begins().completes())


def resumed_at(step: int) -> Story:
    """Return a run that was lost at step 7, after a checkpoint at step 4, and resumed at `step`."""
    return training(7).lost().claimed().begins(step).completes()


def lost_too_often() -> Story:
    once = training(2, max_restarts=1).lost().claimed().begins().trains(2)
    return once.lost().claimed().begins().completes()


def resumed_in_spite_of_damage() -> Spoil:
    """Let an attempt resume from the newest checkpoint although it is corrupt."""
    story = training(9).lost()
    damaged, when = story.checkpoints[-1]["id"], story.now
    rot = FaultRecord(1, "flip_a_byte", f"worker-1 {damaged}", when - 9, when, requeues=True)
    story.claimed().begins(8).completes()
    return together(
        run_added(story), lambda history: replace(history, damaged=history.damaged | {damaged}),
        lambda history: replace(history, faults=(*history.faults, rot)),
    )  # fmt: skip


def resumed_what_was_deleted() -> Spoil:
    """Delete a checkpoint that another run resumes from."""
    parent = waiting().claimed().begins().completes()
    child = Story("child of odd", "plain", LATE + 50, "odd", parent.checkpoints[0]["id"]).claimed().begins(4)
    parent.checkpoints[0]["deleted_at"] = moment(child.completes().now)
    return together(run_added(parent), run_added(child))


def completed_early(history: History) -> History:
    altered = run_added(training(6)._ends("completed", "training is complete"))(history)
    return replace(altered, outputs={**altered.outputs, "odd": OUTPUT})


def hanging(max_restarts: int = 0) -> Story:
    return training(5, "hanger", extra={"hang_at_step": 6}, max_restarts=max_restarts)


def killed_while_hanging() -> Spoil:
    story = hanging().requeued("retried", "the training process hangs", "failed")
    return together(
        run_added(story), lambda history: replace(history, killed_trainers=history.killed_trainers | {story.pid(1)})
    )


def lost_in_the_time_of(*faults: Spoil, worker: str = "wrk_1", after: float = 0.0, how: str = "lost") -> Spoil:
    """Requeue a run after `after` seconds, with only these faults in that time."""
    story = training(worker=worker)
    story.now = LATE + 3 + after
    return together(run_added(story.requeued(how, f"it was {how}").claimed().begins().completes()), *faults)


def lost_while_a_clock_was_wrong() -> Spoil:
    wrong = FaultRecord(1, "jump_clocks", "all", LATE, LATE + 5, requeues=False)
    story = training().lost().claimed().begins().completes()
    return together(run_added(story), lambda history: replace(history, faults=(*history.faults, wrong)))


def stop_before_its_claim(history: History) -> History:
    stop = replace(history.stops[0], answered=history.events["stopped"][0].ts.timestamp() + 0.05)
    altered = replace(history, stops=(stop, *history.stops[1:]))
    return row("stopped", stop_requested_at=moment(stop.answered - 0.01))(altered)


def twins(history: History) -> History:
    """Add a second run for a key, which was not in any response."""
    altered = together(run_added(training().completes()), row("odd", idempotency_key="key-plain"))(history)
    return replace(altered, creations=history.creations)


def unasked(**values: Any) -> Spoil:
    """Add a run that no client created."""
    return together(
        run_added(training().completes()),
        row("odd", **values),
        lambda history: replace(history, creations=history.creations[:-1]),
    )


def disk_is_full() -> Spoil:
    return fault_added("disk_full", "storage", LATE, LATE + 1)


def stopped_after(seconds: float) -> Story:
    """Return a run that ends `seconds` after its stop was accepted."""
    story = training().stop_accepted()
    story.now += seconds
    return story.stops_in_good_order()


def attempts_at_once(history: History) -> History:
    """Let the first attempt write its last line after the second started."""
    lines = list(history.journals["lost"])
    second = next(index for index, one in enumerate(lines) if one["attempt"] == 2)
    last, first = lines[second - 1], lines[second]
    lines[second - 1 : second + 1] = {**first, "t": last["t"]}, {**last, "t": first["t"]}
    return journal("lost", lambda _: lines)(history)


def outlived_its_lease() -> Spoil:
    """Let a trainer write after its lease expired; there is no next attempt, so only the clock shows it."""
    story = training().lost()
    story._pass()
    story._write(event="step", step=4, loss_hex=LOSSES[4], samples=list(SAMPLES[4]))
    return run_added(story.stop_accepted(), after=LATE)


def checkpoint_stored_twice(history: History) -> History:
    again = {**history.checkpoints["plain"][0], "id": "again"}
    reported = {"checkpoint_id": "again", "step": 4, "kind": "periodic", "bytes": 100}
    corrupt = replace(history, checkpoints={**history.checkpoints, "plain": (*history.checkpoints["plain"], again)})
    return event_added("plain", saves(4), "checkpoint", **reported)(corrupt)


def gap(history: History) -> History:
    """Remove an event without renumbering the others."""
    left = tuple(event for event in history.events["plain"] if event.type != "progress")
    altered = replace(history, events={**history.events, "plain": left}, transcripts=())
    return row("plain", attempt_event_count=lambda count: count - 1)(altered)


def creations(change: Any) -> Spoil:
    return lambda history: replace(
        history, creations=tuple(change(one) if one.profile == "plain" else one for one in history.creations)
    )


def checkpoint_rows(change: Any) -> Spoil:
    return lambda h: replace(h, checkpoints={**h.checkpoints, "plain": change(h.checkpoints["plain"])})


def attempt_rows(change: Any) -> Spoil:
    return lambda h: replace(h, attempts={**h.attempts, "crasher": change(h.attempts["crasher"])})


def clock_goes_back(history: History) -> History:
    end = next(event for event in history.events["plain"] if becomes("completed")(event))
    back = replace(end, ts=moment(end.ts.timestamp() - 3600))
    return events("plain", lambda all: [back if event is end else event for event in all])(history)


STEP = {"event": "step", "loss_hex": "0x1p+0", "samples": []}
NO_SPACE = "No space left on device"
STOPPED = "stopped on request"
HELLO = {"line": "hello", "stream": "stderr"}
AGAIN = {"from": "initializing", "to": "running", "reason": "training"}

BROKEN: list[tuple[int, str, Spoil]] = [
    (1, "an accepted run is gone", lambda h: replace(h, creations=(*h.creations, Creation("x", "plain", ("none",))))),
    (1, "two answers to one key", creations(lambda c: replace(c, answers=("plain", "tidy")) if "tidy" in c.key else c)),
    (1, "two runs for one key", twins),
    (1, "another run than asked for is resumed", creations(lambda c: replace(c, parent=c.parent and "tidy"))),
    (1, "a run that was not requested", unasked(idempotency_key=None)),
    (1, "a resume that was not requested", unasked(idempotency_key=None, parent_run_id="stopped")),
    (1, "a run with an unknown key", unasked(idempotency_key="other")),
    (2, "a run stays pending", run_added(waiting())),
    (2, "a lost run is not reaped", run_added(training())),
    (2, "a run fails without a cause", run_added(training().fails("internal", "KeyError"))),
    (3, "two attempts at once", attempts_at_once),
    (3, "two processes for one attempt", line("plain", 3, pid=1)),
    (3, "two processes for one attempt, and no zygote was killed", forked_twice()),
    (3, "two starts of one attempt", line_added("plain", 3, event="start")),
    (3, "a step that comes twice", line_added("crasher", 3, **STEP, step=3)),
    (3, "an older line behind a newer one", line("plain", 3, t=0.0)),
    (3, "a trainer without an attempt", line_added("plain", -1, event="start", attempt=2)),
    (3, "a line behind the last", line_added("plain", -1, event="save", step=12)),
    (3, "a trainer that outlives its lease", outlived_its_lease()),
    (3, "a trainer that is alive after all runs have ended", whole(left={4711: "the journal of plain"})),
    (3, "a rank of an earlier attempt that is alive on another host", whole(overlaps=("process 7 began too early",))),
    (4, "a lost attempt writes into the next", event_added("lost", prints(9), "log", counted=False, **HELLO)),
    (4, "a lost attempt writes while the run waits",
     event_added("lost", becomes("pending", 1), "log", counted=False, **HELLO)),
    (4, "an attempt writes behind the end", event_added("plain", is_end, "log", **HELLO)),
    (4, "a checkpoint without a row", checkpoint_rows(lambda rows: rows[1:])),
    (4, "a checkpoint without an event", event_removed("plain", saves(4))),
    (4, "a checkpoint that is stored twice", checkpoint_stored_twice),
    (4, "the output of an earlier attempt", row("lost", output_attempt=1)),
    (5, "a gap in the numbers", gap),
    (5, "a counter that ran ahead", row("plain", event_seq=lambda count: count + 1)),
    (5, "a reader misses an event", reader(received=lambda all: all[:5] + all[6:])),
    (5, "a reader gets an event twice", reader(received=lambda all: all[:6] + all[5:])),
    (5, "a reader gets events in the wrong order", reader(received=lambda all: (*all[:5], all[6], all[5], *all[7:]))),
    (5, "a reader gets another event than is stored",
     reader(received=lambda all: (*all[:5], (6, "log", {}), *all[6:]))),
    (5, "a reader gets something behind the end", reader(received=lambda all: (*all, (len(all) + 1, "log", {})))),
    (6, "a row of an attempt that is not counted", attempt_rows(lambda rows: (*rows, {**rows[0], "attempt": 2}))),
    (6, "a claim without its row", attempt_rows(lambda rows: ())),
    (6, "one epoch for two attempts", attempt("lost", 1, lease_epoch=1)),
    (7, "a status change that is stored twice",
     event_added("plain", becomes("running"), "status", counted=False, **AGAIN)),
    (7, "a change of status to the same",
     event_added("plain", becomes("running"), "status", counted=False, **{**AGAIN, "from": "running"})),
    (7, "a status without an event", row("plain", status="cancelled")),
    (7, "a line that is stored twice", event_doubled("plain", prints(5))),
    (7, "a line that is missing in between", event_removed("plain", prints(5))),
    (7, "a metric that is stored twice", event_doubled("plain", measures(5))),
    (7, "a metric that is missing in between", event_removed("plain", measures(5))),
    (7, "two ends", event_doubled("plain", is_end, counted=False)),
    (7, "an attempt whose outcome differs from its event", attempt("plain", 0, outcome="cancelled")),
    (7, "more counted than stored", row("plain", attempt_event_count=lambda count: count + 1)),
    (7, "an error that differs from its event", row("full", error_message="No room on the disk")),
    (8, "a claim after a stop", stop_before_its_claim),
    (8, "a run is claimed again after a stop",
     run_added(training().stop_accepted().lost().claimed().begins().completes(), after=LATE)),
    (8, "a stop that was not recorded", row("stopped", stop_requested_at=None)),
    (8, "a stopped run fails as lost", run_added(training(max_restarts=0).stop_accepted().lost("failed"), after=LATE)),
    (9, "a stop that takes too long", run_added(stopped_after(23))),
    (9, "a stop that takes too long in the time of a fault of others",
     together(run_added(stopped_after(23)), fault_added("kill_worker", "worker-2", LATE, LATE + 20))),
    (9, "a stop that takes too long after a fault",
     together(run_added(stopped_after(60)), fault_added("freeze_worker", "worker-1", LATE, LATE + 30))),
    (9, "a stop that was to save and did not", run_added(training(6).stop_accepted().stops_in_good_order(saves=False))),
    (9, "a stopped run that is killed instead of saving",
     run_added(training(6).stop_accepted()._ends("cancelled", STOPPED))),
    (9, "the last line before a stop is missing", event_removed("stopped", prints(6))),
    (9, "the last metric of a completed run is missing", event_removed("plain", measures(12))),
    (9, "the last line of a released run is missing",
     events("handed", lambda all: [e for e in all if not prints(5)(e)], uncounted=-1)),
    (10, "another loss", line("plain", 2, loss_hex="0x1p+0")),
    (10, "other samples", line("lost", -3, samples=[0, 0])),
    (10, "another loss in the log", event_changed("plain", measures(3), loss=0.5)),
    (10, "another output", lambda h: replace(h, outputs={**h.outputs, "child": "other"})),
    (10, "no output", whole(outputs={})),
    (10, "completed before its last step",
     completed_early),
    (11, "a resume from the start in spite of a checkpoint", run_added(resumed_at(0), after=LATE)),
    (11, "a resume from where nothing was saved", run_added(resumed_at(6), after=LATE)),
    (11, "a resume from another step than recorded", attempt("lost", 1, start_step=0)),
    (11, "a resume from a damaged checkpoint", resumed_in_spite_of_damage()),
    (11, "a checkpoint that broke by itself", lambda h: replace(h, broken={**h.broken, "ckpt_plain_1_8": ("torn",)})),
    (11, "a checkpoint that was bad by itself", checkpoint("plain", 0, bad_reason="torn")),
    (11, "a row before its checkpoint was whole",
     line_removed("plain", lambda line: (line["event"], line.get("step")) == ("save", 4))),
    (12, "the newest checkpoint is deleted", checkpoint("plain", -1, deleted_at=moment(LATE), metrics={})),
    (12, "the best checkpoint is deleted", checkpoint("tidy", 0, metrics={"eval_loss": 0.1})),
    (12, "a pinned checkpoint is deleted", checkpoint("tidy", 0, pinned=True)),
    (12, "a checkpoint is deleted that a run resumes", resumed_what_was_deleted()),
    (13, "a disk that was not full", run_added(training().fails("disk_full", NO_SPACE))),
    (13, "a disk that was full long ago",
     together(run_added(training().fails("disk_full", NO_SPACE)),
              fault_added("disk_full", "storage", LATE - 30 - 2 * SLACK, LATE - 20 - 2 * SLACK))),
    (13, "a full disk that is not named",
     together(run_added(training().fails("disk_full", "oops")), disk_is_full())),
    (13, "a full disk that is called something else", run_added(training().fails("internal", "No space left on it"))),
    (14, "an unknown code", run_added(training().fails("it_was_tuesday", "it happens"))),
    (14, "a wrong code", run_added(training(profile="crasher").fails("internal", "?"))),
    (14, "a crash without a cause", whole(killed_trainers=frozenset())),
    (14, "given up as lost too early", run_added(training().lost("failed"), after=LATE)),
    (14, "a run that cannot complete does", run_added(training(profile="crasher").completes())),
    (15, "a trainer hangs for ever", run_added(hanging())),
    (15, "a trainer that hangs completes", run_added(training(extra={"hang_at_step": 6}).completes())),
    (15, "a hanging trainer is only killed by the suite", killed_while_hanging()),
    (16, "a run that loses every worker goes on", run_added(lost_too_often(), after=LATE)),
    (17, "a process that keeps descriptors", whole(growth=(Growth("api-1", (30, 71), (8, 8)),))),
    (17, "a process that keeps threads", whole(growth=(Growth("worker-1", (30, 30), (8, 49)),))),
    (17, "a reader is held up", reader(ended=False, connections=1, received=())),
    (18, "a reader that was cut off does not continue", reader(ended=False, connections=2, received=())),
    (18, "a run is released without a cause",
     run_added(training().requeued("handed_back", "released: …").claimed().begins().completes())),
    (18, "a run makes room for one that does not exist", preempted("elsewhere", priority=5)),
    (18, "a run makes room for one of its own priority", preempted("above", priority=0)),
    (19, "a run is lost without a cause", run_added(training().lost().claimed().begins().completes())),
    (19, "a stopped run is lost without a cause", run_added(training().stop_accepted().lost("cancelled"))),
    (19, "a run is lost because of a fault of the other worker",
     lost_in_the_time_of(fault_added("kill_worker", "worker-2", LATE, LATE + 1))),
    (19, "a run is lost on an unknown worker",
     lost_in_the_time_of(fault_added("kill_worker", "worker-1", LATE, LATE + 1), worker="wrk_3")),
    (19, "a run is lost because of a fault that costs no run",
     lost_in_the_time_of(fault_added("kill_api", "api-1", LATE, LATE + 1, requeues=False))),
    (19, "a run is lost long after a fault, in the time of one that costs no run",
     lost_in_the_time_of(
         fault_added("kill_worker", "worker-1", LATE, LATE + 1),
         fault_added("kill_api", "api-1", LATE + 2, LATE + 30, requeues=False), after=30)),
    (19, "a lease runs out because the storage is full",
     lost_in_the_time_of(fault_added("disk_full", "storage", LATE, LATE + 1))),
    (18, "a run is released because the database is unreachable",
     lost_in_the_time_of(fault_added("long_absence", "postgres", LATE, LATE + 1), how="handed_back")),
    (20, "a run is lost because a clock jumped", lost_while_a_clock_was_wrong()),
    (20, "the clock of the database goes back", clock_goes_back),
]  # fmt: skip
