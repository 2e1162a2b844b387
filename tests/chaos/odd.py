"""Unusual histories that break no promise."""

from dataclasses import replace

from tests.chaos.broken import (
    LATE,
    NO_SPACE,
    STOPPED,
    disk_is_full,
    forked_twice,
    hanging,
    lost_in_the_time_of,
    preempted,
    stopped_after,
    training,
    waiting,
)
from tests.chaos.history import History
from tests.chaos.spoiling import (
    Spoil,
    event_added,
    event_removed,
    fault_added,
    prints,
    run_added,
    together,
    whole,
)  # fmt: skip
from tests.chaos.synthetic import Story, moment


def unnoticed_until_later() -> Spoil:
    """Corrupt a checkpoint after an attempt resumed from it; the next attempt skips it."""
    story = training(9).lost().claimed().begins(8).trains(11).lost().claimed().begins(4).completes()
    rotten = story.checkpoints[1]
    rotten["bad_reason"] = "weights.bin differs"
    return together(
        run_added(story, after=LATE),
        lambda h: replace(h, damaged=h.damaged | {rotten["id"]}, broken={**h.broken, rotten["id"]: ("differs",)}),
    )


def newest_was_deleted_beside_a_bad_one() -> Spoil:
    story = waiting().claimed().begins().completes()
    story.checkpoints[1]["deleted_at"] = moment(story.now)
    story.checkpoints[0]["deleted_at"] = moment(story.now)
    story.checkpoints[2]["bad_reason"] = "weights.bin differs"
    return together(run_added(story), lambda h: replace(h, damaged=h.damaged | {story.checkpoints[2]["id"]}))


def child_of_a_damaged_checkpoint() -> Spoil:
    parent = training(9).stop_accepted().stops_in_good_order()
    parent.checkpoints[-1]["bad_reason"] = "weights.bin differs"
    damaged = parent.checkpoints[-1]["id"]
    child = Story("child of odd", "plain", LATE + 50, "odd", damaged).claimed().begins(8).completes()
    return together(run_added(parent), run_added(child), lambda h: replace(h, damaged=h.damaged | {damaged}))


def killed_before_its_first_line() -> Spoil:
    story = waiting().claimed().fails("trainer_crashed", "signal 9")
    return together(run_added(story), lambda h: replace(h, killed_trainers=h.killed_trainers | {1}))


def killed_and_continued() -> Spoil:
    story = training().requeued("retried", "it was killed")
    killed = story.pid(1)
    return together(
        run_added(story.claimed().begins().completes()),
        lambda h: replace(h, killed_trainers=h.killed_trainers | {killed}),
    )


def killed_before_the_last_words_were_stored() -> Spoil:
    story = training(7)
    story.events, story.attempt_event_count = story.events[:-2], story.attempt_event_count - 2
    return run_added(story.lost().claimed().begins(4).completes(), after=LATE)


def dropped_lines(history: History) -> History:
    note = {"line": "… 1 lines left out: more than 200 a second", "stream": "stderr", "left_out": 1}
    reported = event_added("plain", prints(6), "log", **note)
    return together(reported, event_removed("plain", prints(5)))(history)


def first_line_refused(history: History) -> History:
    """Drop the journal's first line, as on a full disk that had space again when the process ended."""
    story = waiting().claimed()
    story._write(event="stop", outcome="failed")
    return together(run_added(story.fails("disk_full", NO_SPACE)), disk_is_full())(history)


RIGHT: list[tuple[str, Spoil]] = [
    ("stopped while its worker was lost", run_added(training().stop_accepted().lost("cancelled"), after=LATE)),
    ("stopped while it waits for another try", run_added(training().lost().stop_accepted(), after=LATE)),
    ("stopped at its last step", run_added(training(11).stop_accepted().completes())),
    ("stopped without a checkpoint", run_added(training(6).stop_accepted(save=False).stops_in_good_order(saves=False))),
    ("stopped twice, in the end without a checkpoint",
     run_added(training(6).stop_accepted().stop_accepted(save=False).stops_in_good_order(saves=False))),
    ("stopped before it had trained a step", run_added(training(0).stop_accepted().stops_in_good_order(saves=False))),
    ("stopped while it loads", run_added(waiting().claimed().stop_accepted()._ends("cancelled", STOPPED))),
    ("killed because it could not save in time",
     together(run_added(training(6).stop_accepted()._ends("cancelled", STOPPED)),
              fault_added("freeze_postgres", "postgres", LATE, LATE + 1))),
    ("stopped late, because its worker was frozen",
     together(run_added(stopped_after(40)), fault_added("freeze_worker", "worker-1", LATE, LATE + 30))),
    ("stopped late, because the database was unreachable",
     together(run_added(stopped_after(40)), fault_added("long_absence", "postgres", LATE + 20, LATE + 30))),
    ("stopped twice", run_added(training().stop_accepted().stop_accepted().stops_in_good_order())),
    ("lost twice, with a checkpoint in between",
     run_added(training(2, max_restarts=1).lost().claimed().begins().trains(6).lost().claimed().begins(4).completes(),
               after=LATE)),
    ("lost before its trainer began", run_added(waiting().claimed().lost().claimed().begins().completes(), after=LATE)),
    ("lost with the only worker that can train it",
     run_added(training().lost().waits().claimed().begins().completes(), after=LATE)),
    ("lost with its last events", killed_before_the_last_words_were_stored()),
    ("lost for long, because the database was unreachable",
     lost_in_the_time_of(
         fault_added("kill_worker", "worker-1", LATE, LATE + 1),
         fault_added("long_absence", "postgres", LATE + 2, LATE + 40), after=45)),
    ("lost with the other worker", lost_in_the_time_of(fault_added("freeze_worker", "worker-2", LATE, LATE + 1),
                                                       worker="wrk_2")),
    ("lost with the other host of the run",
     together(lost_in_the_time_of(fault_added("kill_worker", "worker-2", LATE, LATE + 1)),
              whole(parts={"odd": ({"lease_epoch": 1, "worker_id": "wrk_2"},)}))),
    ("tried again because the storage was full",
     lost_in_the_time_of(fault_added("disk_full", "storage", LATE, LATE + 1), how="retried")),
    ("lost with a worker whose checkpoint rotted",
     lost_in_the_time_of(fault_added("flip_a_byte", "worker-1 ckpt_1", LATE, LATE + 1))),
    ("forked again, because the first trainer died with its zygote",
     together(forked_twice(), fault_added("kill_zygote", "worker-1", LATE, LATE + 1))),
    ("made room for a run above it", preempted("above", priority=5)),
    ("hanging, and found", run_added(hanging(3).requeued("retried", "it hangs").stop_accepted())),
    ("killed before its first line", killed_before_its_first_line()),
    ("killed, and continued by another attempt", killed_and_continued()),
    ("resumed from a checkpoint that broke later", unnoticed_until_later()),
    ("resumed from before the damaged checkpoint of another run", child_of_a_damaged_checkpoint()),
    ("left without its newest whole checkpoint by later damage", newest_was_deleted_beside_a_bad_one()),
    ("too many log lines", dropped_lines),
    ("failed because of the disk, reported when the database was reachable",
     together(run_added(training().fails("disk_full", NO_SPACE)),
              fault_added("disk_full", "storage", LATE - 10, LATE - 5))),
    ("failed before it could write", first_line_refused),
]  # fmt: skip
