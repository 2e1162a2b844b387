"""Recorder of metrics and evaluations, and of the progress that they show."""

import math
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, update

from anneal.contracts.methods import ranking_metric, to_score
from app.runs.events.log import NewEvent, Progress
from app.tables.runs import Run
from worker.claimed_run import ClaimedRun
from worker.ingest.attempt_state import AttemptState, StartPoint
from worker.ingest.pace import AttemptTimer
from worker.ingest.sink import EventSink
from worker.ingest.spool import RunUpdate

MAX_SERIES = 1000
_MAX_SERIES_NAME = 200
_TOO_MANY_SERIES = (
    f"metrics have more than {MAX_SERIES:,} names, or a name of more than {_MAX_SERIES_NAME} characters: values of "
    "further names are left out, so use the same names at each step"
)
_MAX_BESTS = 10_000
_MAX_STEPS = 2**31 - 1
_MOST_TOKENS = 1e15
"""Tokens between two metrics. What a trainer reports beyond is no measurement, and sums of it could overflow."""


class MetricRecorder:
    """Recorder of metrics and evaluations of one attempt; other recorders set and read its progress too."""

    def __init__(
        self, run: ClaimedRun, sink: EventSink, state: AttemptState, log_line: Callable[[str, str], None]
    ) -> None:
        self.start = StartPoint(0, 0.0, None)
        self.timer = AttemptTimer(run)
        self.total_steps: int | None = None
        self.best_score: float | None = None
        """Score of the best evaluation."""
        self._run, self._sink, self._state, self._log_line = run, sink, state, log_line
        self._bests: list[tuple[int, float | None]] = [(0, None)]
        """Steps at which the loss reached a new minimum, as far back as a checkpoint may still refer to."""
        self._series: set[str] = set()
        """Names of the values in metrics and evaluations: each is a curve, in memory as long as the attempt."""
        self._has_too_many_series = False
        """True once a line of the log has said that values are left out."""

    def start_from(self, start: StartPoint) -> None:
        """Start from a checkpoint."""
        self.start, self._bests, self.best_score = start, [(start.step, start.best_loss)], start.best_score
        self._state.step = start.step

    @property
    def best_loss(self) -> float | None:
        """Lowest loss so far."""
        return self._bests[-1][1]

    def best_loss_at(self, step: int) -> float | None:
        """Return the lowest loss up to `step`; earlier values are dropped, because checkpoints arrive in order."""
        while len(self._bests) > 1 and self._bests[1][0] <= step:
            self._bests.pop(0)
        return self._bests[0][1]

    def set_total_steps(self, total: Any) -> None:
        """Set the total number of steps, if a record has one."""
        if total:
            self.total_steps = checked_count(total, "total_steps")
            self.timer.set_total_steps(self.total_steps)

    def set_progress(self, step: int, epoch: float) -> None:
        """Set the progress that is stored with the next events."""
        self._state.step = step
        self._sink.progress = Progress(step, epoch, self.total_steps, self.best_loss)

    def store_timings(self, *, is_due: bool) -> None:
        """Store what the phases of the attempt have taken so far."""
        if is_due:
            self._sink.enqueue_item(RunUpdate(self.timer.timings_update()))

    def record_metric(self, record: dict[str, Any], ts: float) -> None:
        """Store a `MetricRecord`; frequent, so that only what is used here is checked."""
        del record["type"]
        loss, best = record.get("loss"), self.best_loss
        self.set_total_steps(record.pop("total_steps", None))
        self._limit_series(record.get("extra"))
        event = NewEvent.from_payload("metric", ts, record)
        step = checked_count(record["step"], "step")
        if isinstance(loss, float | int) and (best is None or loss < best):
            self._bests.append((step, float(loss)))
            if len(self._bests) > _MAX_BESTS:
                del self._bests[1:-1:2]  # a checkpoint may then have the best loss of an earlier step
        self.set_progress(step, float(record.get("epoch") or 0))
        self._sink.enqueue_item(event)
        self.timer.record_step(step, _new_tokens(record.get("extra")))
        self.store_timings(is_due=self.timer.is_due)

    def record_evaluation(self, record: dict[str, Any], ts: float) -> None:
        """Store an evaluation, and the score of the run if it is the best so far."""
        self._limit_series(record.get("metrics"))
        event = NewEvent.from_payload(record.pop("type"), ts, record)
        config = self._run.config
        value = (record.get("metrics") or {}).get(ranking_metric(config))
        score = None
        if isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value):
            score = to_score(config, float(value))
        if score is None or (self.best_score is not None and score >= self.best_score):
            self._sink.enqueue_item(event)
            return
        self.best_score = score

        def store_best_score(connection: Connection) -> None:
            connection.execute(
                update(Run)
                .where(Run.id == self._run.id, Run.lease_epoch == self._run.lease_epoch)
                .values(best_score=score)
            )

        self._sink.enqueue_item(RunUpdate(store_best_score, event))

    def _limit_series(self, values: Any) -> None:
        """Remove the values of further names than an attempt may have."""
        if not isinstance(values, dict) or values.keys() <= self._series:
            return
        for name in [name for name in values if name not in self._series]:
            if len(self._series) < MAX_SERIES and len(name) <= _MAX_SERIES_NAME:
                self._series.add(name)
                continue
            del values[name]
            if not self._has_too_many_series:
                self._has_too_many_series = True
                self._log_line(_TOO_MANY_SERIES, "warning")


def checked_count(value: Any, name: str) -> int:
    """Return a number of steps, checked to fit the database."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_STEPS:
        raise ValueError(f"`{name}` must be a whole number from 0 to {_MAX_STEPS:,}")
    return value


def _new_tokens(extra: Any) -> float:
    """Return the tokens of a metric, from its rates and times; 0.0 if the trainer does not report them."""
    try:
        tokens = float(extra["tokens_per_second"] * (extra["step_seconds"] + extra["data_seconds"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0.0
    return tokens if 0 <= tokens <= _MOST_TOKENS else 0.0
