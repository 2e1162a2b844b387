"""Handwritten history of a correct service, which the tests of the checker modify."""

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.chaos.course import RELEASED
from tests.chaos.history import Creation, Event, FaultRecord, Growth, History, Profile, StopCall, Transcript
from tests.chaos.promises_events import on_the_wire

STEPS = 12
SAVE_EVERY = 4
BOOT = "b" * 8
LOSSES = {step: (1 + 1 / step).hex() for step in range(1, STEPS + 1)}
SAMPLES = {step: (2 * step, 2 * step + 1) for step in range(1, STEPS + 1)}
OUTPUT = hashlib.sha256(b"weights").hexdigest()
PROFILES = {
    "plain": Profile("plain", "fake", STEPS, 3, LOSSES, SAMPLES, OUTPUT),
    "crasher": Profile("crasher", "fake", STEPS, 3, {}, {}, None, must_fail_with="trainer_crashed"),
    "hanger": Profile("hanger", "fake", STEPS, 0, {}, {}, None, must_fail_with="worker_lost"),
}


def moment(seconds: float) -> datetime:
    """Convert a Unix time to a datetime as the database returns it."""
    return datetime.fromtimestamp(seconds, UTC)


@dataclass
class Story:
    """Builder of the history of one run; every change takes 0.1 s."""

    run_id: str
    profile: str = "plain"
    began: float = 1_000_000.0
    parent: str | None = None
    resume_checkpoint_id: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    max_restarts: int = 3
    worker: str = "wrk_1"
    priority: int = 0

    def __post_init__(self) -> None:
        self.now = self.began
        self.events: list[Event] = []
        self.journal: list[dict[str, Any]] = []
        self.attempts: list[dict[str, Any]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.stops: list[StopCall] = []
        self.status: str | None = None
        self.step = self.attempt = self.lease_epoch = self.attempt_event_count = 0
        self.lost_count = 0
        self.stop_requested_at: datetime | None = None
        self.error: tuple[str | None, str | None] = (None, None)
        self.output_attempt: int | None = None
        self._move("pending", "created")

    # Actions of the service

    def claimed(self) -> "Story":
        self.attempt += 1
        self.lease_epoch += 1
        self.attempt_event_count = 0
        row = {"run_id": self.run_id, "attempt": self.attempt, "lease_epoch": self.lease_epoch, "start_step": None}
        row["worker_id"] = self.worker
        self.attempts.append({**row, "outcome": None, "ended_at": None})
        self._move("initializing", f"claimed by {self.worker}")
        return self

    def begins(self, step: int = 0) -> "Story":
        """Start the trainer at this step."""
        self.step = step
        self._write(event="start")
        self._say("progress", phase="training")
        self.attempts[-1]["start_step"] = step
        self._move("running", "training")
        return self

    def trains(self, until: int) -> "Story":
        """Train steps, each with a log line and a metric; save periodically, but not at the end."""
        while self.step < until:
            self.step += 1
            loss = LOSSES[self.step]
            self._write(event="step", step=self.step, loss_hex=loss, samples=list(SAMPLES[self.step]))
            self._say("log", line=f"step {self.step} loss 1.0", stream="stdout", level="info")
            self._say("metric", step=self.step, loss=float.fromhex(loss))
            if self.step % SAVE_EVERY == 0 and self.step < until:
                self.saves("periodic")
        return self

    def saves(self, kind: str, eval_loss: float | None = None) -> "Story":
        self._move("checkpointing", "saving a checkpoint")
        self._write(event="save", step=self.step)
        row = {
            "id": f"ckpt_{self.run_id}_{self.attempt}_{self.step}",
            "run_id": self.run_id,
            "attempt": self.attempt,
            "step": self.step,
            "kind": kind,
            "bytes": 100,
            "metrics": {"eval_loss": float(100 - self.step) if eval_loss is None else eval_loss},
            "pinned": False,
            "deleted_at": None,
            "bad_reason": None,
        }
        self.checkpoints.append(row)
        self.lost_count = 0
        self._say("checkpoint", checkpoint_id=row["id"], step=self.step, kind=kind, bytes=100)
        self._move("running", "training")
        return self

    def completes(self) -> "Story":
        self.trains(STEPS).saves("final")
        self._write(event="stop", outcome="completed")
        self.output_attempt = self.attempt
        return self._ends("completed", "training is complete")

    def fails(self, code: str, message: str) -> "Story":
        self.error = (code, message)
        return self._ends("failed", code)

    def requeued(self, outcome: str, reason: str, target: str = "pending") -> "Story":
        self.lease_epoch += 1
        self.lost_count += outcome != "handed_back"
        if target == "failed":
            self.error = ("worker_lost", reason)
        if target != "pending":
            return self._ends(target, reason)
        self._close(outcome)
        self._move("pending", reason)
        return self

    def lost(self, target: str = "pending") -> "Story":
        return self.requeued("lost", "worker lost: its lease ran out", target)

    def waits(self) -> "Story":
        """Report that no worker can train the run."""
        self._event("pending", code="no_worker", message="No worker offers this backend.")
        return self

    def stop_accepted(self, save: bool = True) -> "Story":
        self.stop_requested_at = self.stop_requested_at or moment(self.now)
        if self.status == "pending":
            self._ends("cancelled", "stopped on request")
        self._pass()
        self.stops.append(StopCall(self.run_id, self.now, save))
        return self

    def stops_in_good_order(self, saves: bool = True) -> "Story":
        if saves:
            self.saves("stop")
        self._write(event="stop", outcome="stopped")
        return self._ends("cancelled", "stopped on request")

    # Recording

    def _pass(self) -> float:
        self.now += 0.1
        return self.now

    def _ends(self, target: str, reason: str) -> "Story":
        if target == "failed":
            self._event("error", code=self.error[0], message=self.error[1])
        if self.status != "pending":
            self._close(target)
        self._move(target, reason)
        self._event("end", status=target)
        return self

    def _close(self, outcome: str) -> None:
        self.attempts[-1].update(outcome=outcome, ended_at=moment(self.now))

    def _move(self, target: str, reason: str) -> None:
        reported = {"from": self.status, "to": target, "reason": reason, "attempt": self.attempt}
        self._event("status", **reported)
        self.status = target

    def _event(self, type_: str, /, **data: Any) -> None:
        self.events.append(Event(len(self.events) + 1, type_, self.attempt, moment(self._pass()), data))

    def _say(self, type_: str, /, **data: Any) -> None:
        self.attempt_event_count += 1
        self._event(type_, **data)

    def _write(self, **line: Any) -> None:
        about = {"attempt": self.attempt, "pid": self.pid(self.attempt), "boot_id": BOOT, "t": self._pass()}
        self.journal.append({**line, **about})

    def pid(self, attempt: int) -> int:
        return int(hashlib.sha256(self.run_id.encode()).hexdigest()[:4], 16) * 100 + attempt

    @property
    def row(self) -> dict[str, Any]:
        return {
            "id": self.run_id,
            "backend": "fake",
            "config": {"logging_steps": 1, "extra": {"steps": STEPS, "log_lines_per_step": 1, **self.extra}},
            "idempotency_key": f"key-{self.run_id}",
            "parent_run_id": self.parent,
            "resume_checkpoint_id": self.resume_checkpoint_id,
            "status": self.status,
            "max_restarts": self.max_restarts,
            "priority": self.priority,
            "stop_requested_at": self.stop_requested_at,
            "lease_epoch": self.lease_epoch,
            "attempt": self.attempt,
            "lost_count": self.lost_count,
            "event_seq": len(self.events),
            "first_seq": 1,
            "attempt_event_count": self.attempt_event_count,
            "current_step": self.step,
            "total_steps": STEPS,
            "error_code": self.error[0],
            "error_message": self.error[1],
            "output_attempt": self.output_attempt,
        }


def correct() -> History:
    """Return a history with runs of every kind and no violation."""
    stopped = Story("stopped", began=1_000_100.0).claimed().begins().trains(6).stop_accepted().stops_in_good_order()
    fallen = Story("fallen", began=1_000_500.0).claimed().begins().trains(9)
    fallen.checkpoints[-1]["bad_reason"] = "weights.bin differs"
    tidy = Story("tidy", began=1_000_600.0).claimed().begins().completes()
    tidy.checkpoints[0]["deleted_at"] = moment(tidy.now)
    stories = [
        Story("plain").claimed().begins().completes(),
        stopped,
        Story("waiting", began=1_000_150.0).stop_accepted(),
        Story("lost", began=1_000_200.0).claimed().begins().trains(7).lost().claimed().begins(4).completes(),
        _handed_back(),
        Story("child", "plain", 1_000_400.0, "stopped", stopped.checkpoints[-1]["id"]).claimed().begins(6).completes(),
        fallen.lost().claimed().begins(4).completes(),
        tidy,
        Story("unheard", began=1_000_650.0).claimed().begins().completes(),
        Story("crasher", "crasher", 1_000_700.0).claimed().begins().trains(3).fails("trainer_crashed", "signal 11"),
        Story("hanger", "hanger", 1_000_800.0, extra={"hang_at_step": 6}, max_restarts=0)
        .claimed()
        .begins()
        .trains(5)
        .requeued("retried", "the training process hangs", "failed"),
        Story("poison", began=1_000_900.0, max_restarts=1)
        .claimed()
        .begins()
        .trains(2)
        .lost()
        .claimed()
        .begins()
        .trains(2)
        .lost("failed"),
        Story("full", began=1_001_000.0).claimed().begins().trains(2).fails("disk_full", "No space left on device"),
        Story("killed", began=1_001_100.0).claimed().begins().trains(2).fails("trainer_crashed", "signal 9"),
    ]
    return _history(stories)


def _handed_back() -> Story:
    story = Story("handed", began=1_000_300.0).claimed().begins().trains(5).saves("stop")
    story._write(event="stop", outcome="stopped")
    return story.requeued("handed_back", "released: the worker is shutting down").claimed().begins(5).completes()


def _history(stories: list[Story]) -> History:
    by_id = {story.run_id: story for story in stories}
    taken = [(move, story) for story in stories for move in _moves_that_requeue(story)]
    faults = [FaultRecord(0, "kill_worker", "worker-1", at - 1.0, at - 0.5, requeues=True) for at, _ in taken]
    killed = by_id["killed"]
    damaged = next(row["id"] for row in by_id["fallen"].checkpoints if row["bad_reason"])
    damage = by_id["fallen"].now
    quiet = FaultRecord(0, "jump_clocks", "all", 1_000_001.0, 1_000_003.0, requeues=False)
    fills = by_id["full"].began
    full = FaultRecord(0, "disk_full", "storage", fills, fills + 1, requeues=True)
    rot = FaultRecord(0, "flip_a_byte", f"worker-1 {damaged}", damage - 9.0, damage - 8.9, requeues=False)
    return History(
        profiles=PROFILES,
        creations=(
            *(
                Creation(f"key-{story.run_id}", story.profile, _answers(story.run_id), story.parent)
                for story in stories
            ),
            Creation("key-of-nothing", "plain", ()),
        ),
        stops=tuple(stop for story in stories for stop in story.stops),
        transcripts=tuple(transcript(run_id, tuple(story.events)) for run_id, story in by_id.items()),
        faults=(*faults, quiet, full, rot),
        growth=(Growth("api-1", (30, 45), (8, 12)), Growth("worker-1", (30, 25), (8, 6))),
        workers={"wrk_1": "worker-1", "wrk_2": "worker-2"},
        runs={run_id: story.row for run_id, story in by_id.items()},
        attempts={run_id: tuple(story.attempts) for run_id, story in by_id.items()},
        events={run_id: tuple(story.events) for run_id, story in by_id.items()},
        checkpoints={run_id: tuple(story.checkpoints) for run_id, story in by_id.items()},
        journals={run_id: tuple(story.journal) for run_id, story in by_id.items()},
        broken={damaged: ("weights.bin differs",)},
        outputs={run_id: OUTPUT for run_id, story in by_id.items() if story.output_attempt},
        damaged=frozenset({damaged}),
        killed_trainers=frozenset({killed.pid(1)}),
    )


def _answers(run_id: str) -> tuple[str, ...]:
    """Return the responses to a creation: one client retried, another never got a response."""
    return {"plain": (run_id, run_id), "unheard": ()}.get(run_id, (run_id,))


def transcript(run_id: str, events: tuple[Event, ...]) -> Transcript:
    """Return the transcript of a reader that was cut off once."""
    received = tuple((event.seq, event.type, on_the_wire(run_id, event)) for event in events)
    return Transcript(run_id, received, connections=2, ended=True)


def _moves_that_requeue(story: Story) -> list[float]:
    return [
        event.ts.timestamp()
        for event in story.events
        if event.type == "status" and str(event.data["reason"]).startswith(("worker lost", *RELEASED))
    ]
