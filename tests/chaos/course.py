"""Course of one run, built from the history of a campaign, as input of the promises."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from anneal.contracts.fake_options import FakeOptions
from anneal.contracts.run_status import LIVE, TERMINAL
from tests.chaos.history import Creation, Event, History, Profile, Row, StopCall, Violation

WRITTEN_BY_LIFECYCLE = ("status", "pending", "error", "end")
"""Event types that are not written by trainers: with a status change, or while a run waits for a worker."""
REQUEUES = ("lost", "handed_back", "retried")
REPAIRED = "repaired"
"""Outcome of a failed attempt that is retried with a change; it does not count as a loss."""
_REPAIRS = ("out of memory while", "loss or gradients were non-finite")
"""Prefixes of the reasons of such moves."""
RELEASED = ("released", "preempted")
"""Prefixes of the reasons of released runs: their worker ends, or they make room."""
COUNTED = ("lost", "retried")
"""Requeues that raise `lost_count`."""

_NUMBERED_LINE = re.compile(r"step (\d+) loss")


@dataclass(frozen=True)
class Move:
    """Status change; `ts` is the database's clock, read while the run's row was locked."""

    seq: int
    ts: float
    source: str | None
    target: str
    reason: str
    attempt: int

    @property
    def ends_attempt(self) -> bool:
        return self.source in LIVE and self.target not in LIVE


@dataclass(frozen=True)
class Loss:
    """Attempt that ended because its worker lost or released the run."""

    move: Move
    how: str
    """One of `REQUEUES`."""
    before: int
    """Number of counted losses since the last new checkpoint, without this one."""


@dataclass(frozen=True)
class Course:
    """Everything about one run."""

    run_id: str
    row: Row
    profile: Profile | None
    """None if the creation request of the run is unknown."""
    creation: Creation | None
    events: tuple[Event, ...]
    attempts: tuple[Row, ...]
    checkpoints: tuple[Row, ...]
    journal: tuple[Row, ...]
    stops: tuple[StopCall, ...]

    def broke(self, promise: int, what: str) -> Violation:
        return Violation(promise, self.run_id, what)

    @property
    def has_ended(self) -> bool:
        return self.row["status"] in TERMINAL

    @property
    def must_complete(self) -> bool:
        """True if only a stop or a fault may prevent the run from completing."""
        return self.profile is not None and self.profile.must_fail_with is None and not self.hangs

    @property
    def hangs(self) -> bool:
        """True if its trainers hang on purpose."""
        return self.options is not None and self.options.hang_at_step is not None

    def hung_in(self, attempt: int) -> bool:
        """Return True if the trainer of the attempt reached the step that hangs."""
        if self.options is None or self.options.hang_at_step is None or self.outcome_of(attempt) is not None:
            return False
        start = self.start_of(attempt)
        reached = max(self.steps_of(attempt), default=start)
        return reached == self.options.hang_at_step - 1

    @cached_property
    def options(self) -> FakeOptions | None:
        """Options of the fake trainer; None for a real trainer, whose output is not predictable."""
        if self.row["backend"] != "fake":
            return None
        return FakeOptions.model_validate((self.row.get("config") or {}).get("extra") or {})

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Status changes, in the order of the event log."""
        reported = (event for event in self.events if event.type == "status")
        return tuple(
            Move(
                event.seq,
                event.ts.timestamp(),
                event.data.get("from"),
                str(event.data.get("to")),
                str(event.data.get("reason")),
                event.attempt,
            )
            for event in reported
        )

    def claim_of(self, attempt: int) -> Move | None:
        return next((move for move in self.moves if move.target == "initializing" and move.attempt == attempt), None)

    def end_of(self, attempt: int) -> Move | None:
        """Return the first status change that ended the attempt."""
        return next((move for move in self.moves if move.ends_attempt and move.attempt == attempt), None)

    def of_trainer(self, attempt: int) -> list[Event]:
        return self._of_trainers.get(attempt, [])

    @cached_property
    def _of_trainers(self) -> dict[int, list[Event]]:
        grouped: dict[int, list[Event]] = {}
        for event in self.events:
            if event.type not in WRITTEN_BY_LIFECYCLE:
                grouped.setdefault(event.attempt, []).append(event)
        return grouped

    def lines_of(self, attempt: int) -> list[Row]:
        return self._journals.get(attempt, [])

    @cached_property
    def _journals(self) -> dict[int, list[Row]]:
        grouped: dict[int, list[Row]] = {}
        for line in self.journal:
            grouped.setdefault(line["attempt"], []).append(line)
        return grouped

    def steps_of(self, attempt: int) -> list[int]:
        """Return the steps of the attempt in the journal, in file order, including skipped ones."""
        return [line["step"] for line in self.lines_of(attempt) if line["event"] in ("step", "skip_step")]

    def start_of(self, attempt: int) -> int | None:
        """Return the step at which the attempt started; None if it never trained."""
        steps = self.steps_of(attempt)
        if steps:
            return steps[0] - 1
        return next((row["start_step"] for row in self.attempts if row["attempt"] == attempt), None)

    def outcome_of(self, attempt: int) -> str | None:
        """Return the outcome that the trainer wrote to the journal, or None."""
        return next((line["outcome"] for line in self.lines_of(attempt) if line["event"] == "stop"), None)

    def pid_of(self, attempt: int) -> int | None:
        return next((line["pid"] for line in self.lines_of(attempt)), None)

    def printed_by(self, attempt: int) -> tuple[list[int], bool]:
        """Return the step numbers of the stored lines of the attempt, and True if a message counts lines left out."""
        lines = [event.data for event in self.of_trainer(attempt) if event.type == "log"]
        numbered = (_NUMBERED_LINE.match(data["line"]) for data in lines if data.get("stream") == "stdout")
        return [int(found[1]) for found in numbered if found], any("left_out" in data for data in lines)

    def measured_by(self, attempt: int) -> list[int]:
        """Return the steps of the stored metrics of the attempt."""
        return [int(event.data["step"]) for event in self.of_trainer(attempt) if event.type == "metric"]

    def to_be_printed(self, attempt: int) -> list[int] | None:
        """Return the step numbers of all lines that the trainer printed, from its journal; None if unknown."""
        if self.options is None or not _NUMBERED_LINE.match(self.options.log_line.replace("{step}", "1")):
            return None
        trained = [line["step"] for line in self.lines_of(attempt) if line["event"] == "step"]
        return [step for step in trained for _ in range(self.options.log_lines_per_step)]

    def to_be_measured(self, attempt: int) -> list[int] | None:
        """Return the steps of all metrics that the trainer sent, from its journal; None if unknown."""
        total = self.profile.steps if self.profile else self.row["total_steps"]
        if self.options is None or total is None:
            return None
        every = (self.row.get("config") or {}).get("logging_steps") or 1
        steps = [line for line in self.lines_of(attempt) if line["event"] == "step"]
        return [
            line["step"]
            for line in steps
            if line["step"] % every == 0 or line["step"] == total or line["loss_hex"] == "nan"
        ]

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """Losses of the run; a new checkpoint resets the count in the transaction of its event."""
        losses: list[Loss] = []
        count = 0
        moves = {move.seq: move for move in self.moves}
        for event in self.events:
            if event.type == "checkpoint":
                count = 0
            move = moves.get(event.seq)
            how = self._requeue(move) if move else None
            if move and how:
                losses.append(Loss(move, how, count))
                count += how in COUNTED
        return tuple(losses)

    def _requeue(self, move: Move) -> str | None:
        """Return the kind of requeue, or None; a requeue after a stop or at the limit ends the run instead."""
        if not move.ends_attempt or move.reason.startswith(_REPAIRS):
            return None
        if move.target == "pending":
            rows = (row["outcome"] for row in self.attempts if row["attempt"] == move.attempt)
            return next((outcome for outcome in rows if outcome in REQUEUES), None)
        if move.target == "cancelled" and move.reason != "stopped on request":
            if move.reason.startswith(RELEASED):
                return "handed_back"
            return "lost" if move.reason.startswith("worker lost") else "retried"
        if move.target == "failed" and self.row["error_code"] == "worker_lost":
            return "lost" if move.reason.startswith("worker lost") else "retried"
        return None


def courses(history: History) -> dict[str, Course]:
    """Build the course of every run. Runs are matched by idempotency key, because a response may be lost."""
    by_key = {creation.key: creation for creation in history.creations}
    by_answer = {answer: creation for creation in history.creations for answer in creation.answers}
    stops: dict[str, list[StopCall]] = {}
    for stop in history.stops:
        stops.setdefault(stop.run_id, []).append(stop)
    by_run = {}
    for run_id, row in history.runs.items():
        creation = by_key.get(row["idempotency_key"]) or by_answer.get(run_id)
        by_run[run_id] = Course(
            run_id=run_id,
            row=row,
            profile=history.profiles[creation.profile] if creation else None,
            creation=creation,
            events=history.events.get(run_id, ()),
            attempts=history.attempts.get(run_id, ()),
            checkpoints=history.checkpoints.get(run_id, ()),
            journal=history.journals.get(run_id, ()),
            stops=tuple(stops.get(run_id, ())),
        )
    return by_run


def ancestors(history: History, row: Row) -> Iterator[str]:
    """Yield the runs that a run resumes, nearest first."""
    seen: set[str] = set()
    parent = row["parent_run_id"]
    while parent and parent in history.runs and parent not in seen:
        seen.add(parent)
        yield parent
        parent = history.runs[parent]["parent_run_id"]


def candidates(history: History, course: Course, attempt: int) -> Iterator[Row]:
    """Yield the checkpoints that existed for this attempt, in the order in which the worker checks them.

    Rows are inserted and marked as deleted in transactions that are fenced by the claim, so the checkpoints of earlier
    attempts exist unless they were deleted before the claim, and the rows of ended runs do not change.
    """
    claim = course.claim_of(attempt)
    when = claim.ts if claim else 0.0
    own = [row for row in course.checkpoints if row["attempt"] < attempt and not _gone(row, when)]
    yield from _furthest_first(own)
    row = course.row
    while (chosen := resumed_checkpoint(history, row)) is not None:
        earlier = [one for one in history.checkpoints[chosen["run_id"]] if one["step"] < chosen["step"]]
        yield from (one for one in [chosen, *_furthest_first(earlier)] if not _gone(one, when))
        row = history.runs[chosen["run_id"]]


def resumed_checkpoint(history: History, row: Row) -> Row | None:
    """Return the checkpoint of an ancestor from which a run was created to resume, or None."""
    checkpoint_id = row["resume_checkpoint_id"]
    inherited = (one for run_id in ancestors(history, row) for one in history.checkpoints.get(run_id, ()))
    return next((one for one in inherited if one["id"] == checkpoint_id), None) if checkpoint_id else None


def is_prefix(part: Sequence[int], whole: Sequence[int]) -> bool:
    return list(part) == list(whole[: len(part)])


def first_difference(part: Sequence[int], whole: Sequence[int]) -> str:
    """Describe the first difference of two sequences, for a message."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(part, whole, strict=False)))
    return f"…{list(part[max(same - 1, 0) : same + 3])} instead of …{list(whole[max(same - 1, 0) : same + 3])}"


def _gone(row: Row, when: float) -> bool:
    return row["deleted_at"] is not None and row["deleted_at"].timestamp() < when


def _furthest_first(rows: Sequence[Row]) -> list[Any]:
    return sorted(rows, key=lambda row: (row["step"], row["id"]), reverse=True)
