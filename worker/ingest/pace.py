"""Timings of the phases of an attempt by the worker's monotonic clock, on which later predictions are based."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, Executable, func, literal, select
from sqlalchemy.dialects.postgresql import JSONB, insert

from app.runs.queue import durations
from app.runs.queue.durations import Timings
from app.tables.runs import AttemptTimings, Run
from app.tables.workers import Device
from worker.claimed_run import ClaimedRun

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_WRITES = 0.5
_MAX_WINDOWS = 64


class AttemptTimer:
    """Timer that receives each phase and metric of one attempt; `is_due` says when there is something to store."""

    def __init__(self, run: ClaimedRun) -> None:
        self._run = run
        self._claimed = self._added_at = self._reached = time.monotonic()
        self._phase = ""
        self._seconds_in: dict[str, float] = {"training": 0.0, "evaluating": 0.0, "saving": 0.0}
        self._counts: dict[str, int] = {"evaluating": 0, "saving": 0}
        self._windows: deque[tuple[int, float]] = deque(maxlen=_MAX_WINDOWS)
        self._written: float | None = None
        self._timings = Timings()
        try:
            extra = sorted(run.extra_eval_datasets.values())
            sharing = run.requirements.get("sequence_parallel", 1)
            twin = durations.config_digest(
                run.config, run.dataset_id, run.eval_dataset_id, *extra, devices=run.devices_needed,
                sequence_parallel=sharing,
            )  # fmt: skip
            self._timings = Timings(twin=twin, work=durations.step_size(run.config, sharing))
        except Exception:  # no attempt fails because its duration cannot be predicted
            log.exception("%s: no timings for predictions: the configuration cannot be read", run.id)
        self.training_started = False
        """True once the first step is reached, so that there is something to store."""

    def enter_phase(self, phase: str, start_step: int = 0) -> None:
        """Start a phase, which ends the one before it; the first `training` starts at `start_step`."""
        self._add_elapsed()
        if phase in self._counts and phase != self._phase:
            self._counts[phase] += 1
        self._phase = phase
        if phase == "training" and not self.training_started:
            self.training_started = True
            self._reached = self._added_at
            loading = self._added_at - self._claimed
            self._timings = replace(self._timings, start_step=start_step, step=start_step, loading=loading)

    def set_total_steps(self, steps: int) -> None:
        """Set the total number of steps: initially, and again when the run is extended."""
        self._timings = replace(self._timings, total_steps=steps)

    def record_step(self, step: int, tokens: float = 0.0) -> None:
        """Record that a metric reports this step as done, with so many tokens since the last metric."""
        self._add_elapsed()
        steps, seconds = step - self._timings.step, self._seconds_in["training"] - self._timings.training
        if not self.training_started or steps <= 0:
            return
        self._windows.append((steps, seconds))
        self._reached = self._added_at
        self._timings = replace(
            self._timings,
            step=step,
            tokens=self._timings.tokens + tokens,
            training=self._seconds_in["training"],
            step_seconds=durations.step_seconds(list(self._windows)),
            evaluations=self._counts["evaluating"],
            evaluating=self._seconds_in["evaluating"],
            saves=self._counts["saving"],
            saving=self._seconds_in["saving"],
        )

    def record_end(self, outcome: str) -> None:
        """Record the outcome with which the trainer ended."""
        self._add_elapsed()
        # A trainer that fails after its last step has not done what follows it.
        if self.training_started and outcome == "completed" and self._timings.step == self._timings.total_steps:
            self._timings = replace(self._timings, finishing=self._added_at - self._reached)

    @property
    def is_due(self) -> bool:
        """True if the measurements are to be stored now: the first time at once, later at intervals."""
        now = time.monotonic()
        if not self.training_started or (self._written is not None and now - self._written < _SECONDS_BETWEEN_WRITES):
            return False
        self._written = now
        return True

    def timings_update(self) -> Callable[[Connection], None]:
        """Return a function that stores what was measured so far, unless another worker owns the run by then."""
        timings, reached = asdict(self._timings), self._reached

        def store_timings(connection: Connection) -> None:
            # Only the database's clock gives timestamps; this process only knows how long ago the step was reached.
            connection.execute(_timings_statement(self._run, timings, time.monotonic() - reached))

        return store_timings

    def _add_elapsed(self) -> None:
        now = time.monotonic()
        if self._phase in self._seconds_in:
            self._seconds_in[self._phase] += now - self._added_at
        self._added_at = now


def _timings_statement(run: ClaimedRun, timings: dict[str, Any], behind: float) -> Executable:
    device = select(func.min(Device.name)).where(Device.run_id == run.id).scalar_subquery()
    measured_at = func.clock_timestamp() - func.make_interval(0, 0, 0, 0, 0, 0, behind)
    like = literal(durations.similarity_key(run.backend, run.config))
    mine = select(Run.id, literal(run.attempt), like, device, measured_at, literal(timings, JSONB)).where(
        Run.id == run.id, Run.lease_epoch == run.lease_epoch
    )
    new = insert(AttemptTimings).from_select(
        ["run_id", "attempt", "similarity_key", "device", "measured_at", "timings"], mine
    )
    return new.on_conflict_do_update(
        index_elements=["run_id", "attempt"],
        set_={"measured_at": new.excluded.measured_at, "timings": new.excluded.timings},
    )
