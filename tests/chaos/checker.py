"""Checker that decides from the recorded history alone if a campaign broke a promise.

Each promise is a function over the course of one run (or over the events that one reader received) that yields its
violations; they are in the modules `promises_…`. A false alarm is as bad as a missed violation, so each docstring
explains why its assertion holds for every order of events.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.chaos import promises_events, promises_processes, promises_runs, promises_stops, promises_training
from tests.chaos.causes import a_clock_was_wrong, moments_without_excuse, worker_of
from tests.chaos.course import COUNTED, Course, candidates, courses
from tests.chaos.history import History, Violation

PROMISES: tuple[Callable[[History, Course], Iterator[Violation]], ...] = (
    promises_runs.no_run_is_lost,
    promises_training.one_trainer_at_a_time,
    promises_events.stale_writers_write_nothing,
    promises_events.events_are_whole,
    promises_events.hints_do_no_harm,
    promises_events.ambiguous_commits_are_safe,
    promises_stops.stop_always_wins,
    promises_stops.stop_is_bounded,
    promises_stops.stop_saves,
    promises_training.resume_is_exact,
    promises_training.torn_checkpoints_are_never_resumed,
    promises_training.clean_up_keeps_what_is_needed,
    promises_runs.disk_full_is_said,
    promises_runs.failures_are_classified,
    promises_runs.alive_means_progress,
    promises_runs.poison_runs_do_not_loop,
    promises_runs.requeues_are_explained,
)
"""Promises about each run. Others are about keys, transcripts and processes, see `check`."""

MOMENTS = "half seconds in which a loss would be unexplained"
MOMENTS_OF_WRONG_CLOCKS = f"{MOMENTS}, while a clock was wrong"
"""Counted, because without such moments promises 18 to 20 were not tested."""


@dataclass
class Report:
    """Result of the checker."""

    violations: list[Violation] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    """Number of compared items, which shows how much a campaign without violations proves."""
    observed: Counter[str] = field(default_factory=Counter)
    """Windows that the faults hit, according to the history."""


def check(history: History) -> Report:
    """Check the history against every promise."""
    courses_by_run = courses(history)
    violations = [
        *promises_events.accepted_is_durable(history),
        *promises_processes.no_trainer_is_left(history),
        *promises_processes.attempts_do_not_overlap(history),
        *promises_processes.processes_do_not_grow(history),
    ]
    for course in courses_by_run.values():
        for promise in PROMISES:
            violations += promise(history, course)
    for transcript in history.transcripts:
        violations += promises_events.readers_see_every_event_once(history, transcript)
    return Report(violations, count(history, courses_by_run), observe(history, courses_by_run))


def count(history: History, courses_by_run: dict[str, Course]) -> dict[str, int]:
    """Count the compared items by kind."""
    steps = [
        line
        for course in courses_by_run.values()
        if course.profile and course.profile.losses
        for line in course.journal
        if line["event"] == "step"
    ]
    moments = [moment for course in courses_by_run.values() for moment in moments_without_excuse(history, course)]
    return {
        MOMENTS: len(moments),
        MOMENTS_OF_WRONG_CLOCKS: sum(a_clock_was_wrong(history, moment) for moment in moments),
        "runs": len(courses_by_run),
        "creations": len(history.creations),
        "stops": len(history.stops),
        "faults": len(history.faults),
        "clock faults": sum("clock" in fault.kind for fault in history.faults),
        "attempts": sum(len(course.attempts) for course in courses_by_run.values()),
        "status changes": sum(len(course.moves) for course in courses_by_run.values()),
        "events": sum(len(course.events) for course in courses_by_run.values()),
        "stream events compared": sum(len(transcript.received) for transcript in history.transcripts),
        "streams": len(history.transcripts),
        "processes compared with what they were": len(history.growth),
        "journal lines": sum(len(course.journal) for course in courses_by_run.values()),
        "journal steps compared": len(steps),
        "checkpoints": sum(len(course.checkpoints) for course in courses_by_run.values()),
        "checkpoints verified": sum(
            row["deleted_at"] is None for course in courses_by_run.values() for row in course.checkpoints
        ),
        "outputs compared": sum(
            course.row["status"] == "completed" and course.profile is not None and course.profile.output is not None
            for course in courses_by_run.values()
        ),
        "attempts whose every word is stored": sum(
            promises_stops.ended_in_good_order(course, row["attempt"])
            for course in courses_by_run.values()
            for row in course.attempts
        ),
    }


def observe(history: History, courses_by_run: dict[str, Course]) -> Counter[str]:
    """Count the windows that were hit."""
    seen: Counter[str] = Counter()
    for course in courses_by_run.values():
        seen[f"ended {course.row['status']}"] += 1
        if course.row["error_code"]:
            seen[f"failed with {course.row['error_code']}"] += 1
        if course.creation and not course.creation.answers:
            seen["creation that was never answered"] += 1
        for loss in course.losses:
            verb = "requeued" if loss.move.target == "pending" else f"{loss.move.target} instead of requeued"
            seen[f"{verb}:{loss.how}"] += 1
            seen[f"lost while {loss.move.source}"] += loss.how in COUNTED
        if course.stops:
            seen[f"stop while {promises_stops.phase_at(course, course.stops[0])}"] += 1
            seen["completed despite stop"] += course.row["status"] == "completed"
        for before, after in zip(course.attempts, course.attempts[1:], strict=False):
            hosts = [worker_of(history, course, row["attempt"]) for row in (before, after)]
            seen["taken over by the other worker"] += hosts[0] != hosts[1]
        for row in course.attempts:
            seen.update(_how_it_began(history, course, row["attempt"]))
    for creation in history.creations:
        seen["replayed creation"] += max(len(creation.answers) - 1, 0)
    for transcript in history.transcripts:
        seen["stream reconnects"] += max(transcript.connections - 1, 0)
    return +seen


def _how_it_began(history: History, course: Course, attempt: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    start = course.start_of(attempt)
    if start is None:
        seen["attempt that never came to train"] += 1
        return seen
    if attempt > 1:
        seen["resumed from checkpoint" if start else "resumed from the start"] += 1
    elif start:
        seen["child resumed from checkpoint"] += 1
    earlier = [step for before in range(1, attempt) for step in course.steps_of(before)]
    seen["rolled back steps"] += max(0, max(earlier, default=start) - start)
    seen["fell back past a damaged checkpoint"] += any(
        row["step"] > start and row["bad_reason"] is not None for row in candidates(history, course, attempt)
    )
    return seen
