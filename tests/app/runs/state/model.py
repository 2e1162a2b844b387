"""What the database must do, written once more in plain Python: the runs, their events, attempts and devices."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from app.runs.queue.fit import DeviceOffer, Needs, WorkerOffer
from tests.app.runs.state.calls import REAP_LEASE, START_STEP, Call, Offer, line

LIVE = ("initializing", "running", "checkpointing")
ENDED = ("completed", "failed", "cancelled")
SKIPPING = ("claim", "reap", "reap_dead", "hint_due")
"""These pass over a row that somebody else has locked; all others wait for it."""
_GUARDED = {  # verb: (from, to, reason)
    "begin": (("initializing",), "running", "training"),
    "saving": (("running",), "checkpointing", "saving a checkpoint"),
    "saved": (("checkpointing",), "running", "training"),
    "complete": (LIVE, "completed", "all steps done"),
    "fail": (LIVE, "failed", "bad_data"),
    "cancel": (LIVE, "cancelled", "stopped on request"),
}
_REQUEUES = {  # verb: (reason, outcome, whether it counts as a loss)
    "release": ("drain", "handed_back", False),
    "retry": ("trainer lost", "retried", True),
    "reap": ("worker lost: its lease ran out", "lost", True),
    "reap_dead": ("worker lost: its process is gone", "lost", True),
}


@dataclass
class ModelRun:
    """A run as it should be."""

    id: str
    priority: int
    backend: str
    devices_needed: int
    needs: Needs
    max_restarts: int
    status: str = "pending"
    lease_epoch: int = 0
    attempt: int = 0
    lost_count: int = 0
    owner: str | None = None
    stop: bool = False
    save: bool = True
    ends_with_epoch: bool = False
    """It is to stop at the end of its epoch, which is no stop until a worker has seen that end."""
    expired: bool = False
    paused: bool = False
    hinted: bool = False
    stored: int = 0
    step: int = 0
    best_loss: float | None = None
    checkpoint_step: int | None = None
    output_attempt: int | None = None
    error: str | None = None
    pause: float | None = None
    """How long the last move made it wait, in seconds; None: it made it wait for nothing."""
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether a worker owns it."""
        return self.status in LIVE

    def record(self, kind: str, **data: Any) -> None:
        """Add an event."""
        self.events.append((kind, self.attempt, data))

    def move(self, target: str, reason: str, outcome: str = "", error: str | None = None) -> tuple[Any, ...]:
        """Change the status and tell of it; answers the row that the caller sees."""
        source, self.status = self.status, target
        if target == "failed":
            self.error = error
            self.record("error", code=error)
        if target != source:
            self.record("status", **{"from": source, "to": target, "reason": reason, "attempt": self.attempt})
        if target in ENDED:
            self.record("end", status=target)
        if not self.live:
            self.owner, self.expired = None, False
            if self.attempts and self.attempts[-1]["outcome"] is None:
                self.attempts[-1]["outcome"] = outcome if target == "pending" else target
        return self.id, source, target, self.lease_epoch, self.attempt, len(self.events)


class Model:
    """All runs and devices, and what each call does to them."""

    def __init__(self, workers: list[Offer]) -> None:
        self.runs: dict[str, ModelRun] = {}
        self.workers = workers
        self.devices: dict[tuple[str, int], tuple[str, int] | None] = {
            (worker.id, index): None for worker in workers for index in range(worker.devices)
        }

    def locks(self, call: Call) -> set[str]:
        """The runs whose rows the call finds and locks."""
        if call.verb == "claim":
            best = self._best(call, set())
            return {best.id} if best else set()
        if call.verb == "create":
            return set()
        return {run.id for run in self._found(call)}

    def waits(self, call: Call, other: Call, locked: set[str]) -> bool:
        """Return True if the call has to wait for `other`; `locked` are the runs that `other` locks."""
        if call.verb == other.verb == "claim":
            return True  # claims take turns
        return call.verb not in SKIPPING and bool(self.locks(call) & locked)

    def apply(self, call: Call, locked: set[str] | None = None) -> Any:
        """Do it; answers what the caller must learn. `locked`: the runs that somebody else holds just now."""
        locked = locked or set()
        if call.verb == "create":
            if call.run in self.runs:
                return "refused"
            values = dict(call.values)
            wants = values.pop("requirements")
            run = self.runs[call.run] = ModelRun(
                id=call.run, needs=Needs.of(values["backend"], values["devices_needed"], 1, wants), **values
            )
            run.record("status", **{"from": None, "to": "pending", "reason": "created", "attempt": 0})
            return "pending"
        if call.verb == "claim":
            return self._claim(call, locked)
        if call.verb in ("append", "checkpoint"):
            return self._append(call)
        runs = self._found(call, locked)
        if call.verb == "renew":
            for run in runs:
                run.expired = False
            return (runs[0].stop, runs[0].save) if runs else None
        if call.verb == "hint_due":
            for run in runs:
                run.hinted = True
            return sorted(run.id for run in runs)
        if call.verb == "cancel" and runs and not (runs[0].stop or runs[0].ends_with_epoch):
            return "refused"
        return sorted(self._move(call, run) for run in runs)

    def _found(self, call: Call, locked: set[str] | None = None) -> list[ModelRun]:
        runs = [run for run in self.runs.values() if run.id not in (locked or ())]
        run = self.runs.get(call.run)
        if call.verb == "reap":
            return [run for run in runs if run.live and run.expired]
        if call.verb == "reap_dead":
            return [run for run in runs if run.live and call.worker and run.owner == call.worker.id]
        if call.verb == "hint_due":
            due = [run for run in runs if run.status == "pending" and not run.paused and not run.hinted]
            return sorted(due, key=lambda run: (-run.priority, run.id))[: call.limit]
        asks = call.verb in ("request_stop", "request_stop_at_epoch_end")
        if run is None or (not asks and run.lease_epoch != call.lease_epoch):
            return []
        if asks:
            return [run] if run.status not in ENDED else []
        sources = _GUARDED[call.verb][0] if call.verb in _GUARDED else LIVE
        return [run] if run.status in sources else []

    def _best(self, call: Call, locked: set[str]) -> ModelRun | None:
        worker = call.worker
        assert worker
        gpu_backends = frozenset(backend for one in self.workers if one.kind == "cuda" for backend in one.backends)
        offer = WorkerOffer(worker.id, frozenset(worker.backends), worker.kind, "", (), frozenset(worker.labels))
        room = len(self._free(worker))
        fitting = [
            run
            for run in self.runs.values()
            if run.status == "pending"
            and not run.paused
            and run.id not in locked
            and run.devices_needed <= room
            and run.needs.allows_worker(offer, gpu_backends)
            and run.needs.fits(worker.kind, DeviceOffer(worker.memory_mb or 0, name=worker.kind))
        ]
        return min(fitting, key=lambda run: (-run.priority, run.id), default=None)

    def _free(self, worker: Offer) -> list[int]:
        return sorted(index for (owner, index), held in self.devices.items() if owner == worker.id and held is None)

    def _claim(self, call: Call, locked: set[str]) -> Any:
        run, worker = self._best(call, locked), call.worker
        assert worker
        if run is None:
            return None
        run.lease_epoch += 1
        run.attempt += 1
        run.stored = 0
        run.owner = worker.id
        run.attempts.append({"lease_epoch": run.lease_epoch, "worker": worker.id, "start_step": None, "outcome": None})
        taken = self._free(worker)[: run.devices_needed]
        for index in taken:
            self.devices[worker.id, index] = (run.id, run.lease_epoch)
        return (*run.move("initializing", f"claimed by {worker.id}"), taken)

    def _append(self, call: Call) -> str:
        run = self.runs.get(call.run)
        if run is None or run.lease_epoch != call.lease_epoch or not run.live:
            return "fenced"
        if call.first > run.stored + 1:
            return "gap"
        last = call.first + call.count - 1
        new = range(run.stored + 1, last + 1)
        for number in new:
            run.record(call.verb if call.verb == "checkpoint" else "log", line=line(call.lease_epoch, number))
        run.stored = max(run.stored, last)
        if call.verb == "checkpoint":
            run.lost_count, run.checkpoint_step = 0, call.step
        # What was stored already was stored with its progress.
        elif new and call.step:
            run.step = call.step
            run.best_loss = min(run.best_loss or 1.0, 1 / (call.step + 1))
        return "stored"

    def _move(self, call: Call, run: ModelRun) -> tuple[Any, ...]:
        if call.verb == "request_stop":
            run.save = call.save and (run.save or not run.stop)
            run.stop, run.ends_with_epoch = True, False
            row = run.move("cancelled" if run.status == "pending" else run.status, "stopped on request")
        elif call.verb == "request_stop_at_epoch_end":
            run.ends_with_epoch = not run.stop
            never_started = run.status == "pending" and run.attempt == 0
            run.stop = run.stop or never_started
            row = run.move("cancelled" if never_started else run.status, "stopped on request")
        elif call.verb in _REQUEUES:
            row = self._requeue(call, run)
        else:
            row = self._guarded(call, run)
        if not run.live:
            for key, held in self.devices.items():
                if held and held[0] == run.id:
                    self.devices[key] = None
        return row

    def _guarded(self, call: Call, run: ModelRun) -> tuple[Any, ...]:
        _, target, reason = _GUARDED[call.verb]
        if call.verb == "begin":
            run.step, run.best_loss = START_STEP, None
            run.attempts[-1]["start_step"] = START_STEP
        if call.verb == "cancel":
            run.stop = True
        if call.verb in ("complete", "fail"):
            run.output_attempt = 1 if call.verb == "complete" else None
        return run.move(target, reason, error="bad_data")

    def _requeue(self, call: Call, run: ModelRun) -> tuple[Any, ...]:
        reason, outcome, counted = _REQUEUES[call.verb]
        delay = {"retry": call.delay, "reap": REAP_LEASE / 3}.get(call.verb, 0.0)
        run.pause = delay if run.lost_count == 0 else max(delay, 1.0) * 2 ** min(run.lost_count, 6)
        run.paused = run.pause > 0
        run.hinted = False
        run.lease_epoch += 1
        gives_up = counted and run.lost_count >= run.max_restarts
        run.lost_count += counted
        target = "cancelled" if run.stop else "failed" if gives_up else "pending"
        return run.move(target, reason, outcome, "worker_lost")

    def join(self, before: "Model", other: "Model") -> None:
        """Take over what `other` has changed since `before`; the two must not have changed the same thing."""
        for key, run in other.runs.items():
            if run != before.runs.get(key):
                assert self.runs.get(key) == before.runs.get(key)
                self.runs[key] = run
        for place, held in other.devices.items():
            if held != before.devices[place]:
                assert self.devices[place] == before.devices[place]
                self.devices[place] = held

    def copy(self) -> "Model":
        """One that goes its own way."""
        return deepcopy(self)
