"""Context of a run in its training process: the job, the connection to the supervisor, and the loop's state."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from anneal.contracts.attempt.job import DataSource, EvaluatedCheckpoint, JobSpec, ResumePoint
from anneal.contracts.attempt.messages import StepMetrics
from anneal.contracts.methods import METHODS, Method
from anneal.contracts.stop import StopRequest
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import Replacement
from anneal.contracts.training_config.rules import DeviceCapabilities
from worker.training.failures import Stopped, TrainingFailure
from worker.training.ranks import Ranks
from worker.training.run_state import DISTRIBUTIONS, MEMORY, History, RunState
from worker.training.tracking.trackers import Trackers
from worker.wire.control import Control
from worker.wire.journal import Journal
from worker.wire.reporter import Reporter

_SECONDS_BETWEEN_PROGRESS = 0.5
_STOP = "stop"
"""Flag that rank 0 sets for the other ranks."""


@dataclass
class TrainingContext:
    """Context that all parts of a training process share."""

    job: JobSpec
    config: TrainingConfig
    """Configuration in effect, with every default resolved for this machine, model and data."""
    user_set_fields: set[str]
    machine: DeviceCapabilities
    report: Reporter
    control: Control
    journal: Journal
    ranks: Ranks = field(default_factory=Ranks)
    """Processes that train this run together."""
    trackers: Trackers = field(default_factory=Trackers)
    state: RunState = field(default_factory=RunState)
    metric_factories: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Metric functions of evaluations, as factories by name."""
    ended_by: str | None = None
    """Reason for an end before the last step: stop, drain, time_limit, stop_at_step, early_stopping, callback,
    epoch_end."""
    save_kind: str = "periodic"
    """Kind of the checkpoint that is due: periodic, best, stop or final."""
    history: History = field(init=False)
    distributions: History = field(init=False)
    memory: History = field(init=False)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """Everything apart from the configuration that the numeric results of this run depend on."""
    listeners: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    """Functions that are called with each metric and evaluation."""
    steps_per_epoch: int = 0
    """Optimizer steps per epoch."""
    routes_together: bool = False
    """True if the ranks compute an auxiliary loss of routers together in evaluations too."""
    best_checkpoint: EvaluatedCheckpoint | None = field(init=False)
    """Checkpoint with the best evaluation so far, also of earlier attempts."""
    _progress_sent_at: float = 0.0
    _stops_together: bool = False

    def __post_init__(self) -> None:
        self.best_checkpoint = self.job.best_checkpoint
        self.history = History(self.folder)
        self.distributions = History(self.folder, DISTRIBUTIONS)
        self.memory = History(self.folder, MEMORY)

    @property
    def folder(self) -> Path:
        """Folder of the attempt, for checkpoints and output."""
        return self.job.attempt_dir

    @property
    def dataset(self) -> DataSource:
        """Dataset of the job, which only a serving run does not have."""
        if self.job.dataset is None:
            raise TrainingFailure("internal", "The job has no dataset.")
        return self.job.dataset

    @property
    def method(self) -> Method:
        """Properties of the training method."""
        return METHODS[self.config.method]

    @property
    def is_inference(self) -> bool:
        """True for a run that uses given weights and does not train: an evaluation, a prediction or a serving run."""
        return self.job.task.is_inference

    @property
    def is_sharded(self) -> bool:
        """True if the model is divided among the ranks, so that each forward pass is one of all ranks."""
        return self.job.sharded and self.ranks.size > 1

    @property
    def forwards_together(self) -> bool:
        """True if ranks wait for each other in a forward pass, so that all of them must begin it."""
        return self.is_sharded or self.ranks.per_sequence > 1 or self.routes_together

    @property
    def save_every(self) -> int:
        """Steps between two checkpoints; known once the data is read."""
        return self._steps_of(self.config.save_steps)

    @property
    def eval_every(self) -> int | None:
        """Steps between two evaluations; None: there are none."""
        return None if self.config.eval_steps is None else self._steps_of(self.config.eval_steps)

    @property
    def sample_every(self) -> int | None:
        """Steps between two samples; None: there are none."""
        return None if self.config.sample_steps is None else self._steps_of(self.config.sample_steps)

    def _steps_of(self, interval: int | Literal["epoch"]) -> int:
        return self.steps_per_epoch if interval == "epoch" else interval

    @property
    def is_probe(self) -> bool:
        """True for a probe, which only measures: nothing of it is kept."""
        return self.config.trainer_options.probe

    @property
    def histories(self) -> list[History]:
        """History files that this run writes, and carries from checkpoint to checkpoint."""
        if not self.ranks.is_first:
            return []
        options = self.config.trainer_options
        optional_histories = ((self.distributions, options.distributions_steps), (self.memory, options.memory_profile))
        return [self.history, *(history for history, setting in optional_histories if setting)]

    def note_evaluated_checkpoint(self, checkpoint: EvaluatedCheckpoint) -> None:
        """Handle a checkpoint whose weights were evaluated: it may be the best one."""
        best, score = self.best_checkpoint, self.method.to_score
        if best is None or score(checkpoint.metric) < score(best.metric):
            self.best_checkpoint = checkpoint

    @property
    def resume_from(self) -> ResumePoint | None:
        """Checkpoint to resume from."""
        return self.job.resume_from

    @property
    def stop_requested(self) -> StopRequest | None:
        """Stop request of the supervisor or of a signal, if any."""
        return self.control.stop_requested

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` if a stop was requested, on every rank.

        For phases where there is nothing to save: loading, tokenizing, exporting.
        """
        if self._stops_together:
            if self.ranks.broadcast_value(self.stop_requested is not None):
                raise Stopped
            return
        if self.ranks.is_first:
            if self.stop_requested is None:
                return
            self.ranks.set_flag(_STOP)
        elif not self.ranks.has_flag(_STOP):
            return
        raise Stopped

    @contextmanager
    def stopping_together(self, together: bool) -> Iterator[None]:
        """During the block, which all ranks go through alike if it is done `together`, stop them at the same place."""
        self._stops_together = together
        try:
            yield
        finally:
            self._stops_together = False

    def report_config(self, replaced: Sequence[Replacement], facts: Mapping[str, object]) -> None:
        """Report the configuration in effect, the defaults that were replaced and the initial run info."""
        effective = self.config.model_dump(mode="json")
        replacements = [replacement.model_dump(mode="json") for replacement in replaced]
        self.report.send({"type": "config", "effective": effective, "replaced": replacements, "facts": facts})

    def record_metric(self, metrics: StepMetrics, extra: dict[str, Any], total_steps: int) -> None:
        """Report, store and track the measurements of a step, in one place so that the three cannot differ."""
        self.report.send({"type": "metric", **metrics, "total_steps": total_steps, "extra": extra})
        self._record_everywhere({**metrics, "extra": extra})

    def record_evaluation(self, step: int, epoch: float | None, metrics: dict[str, float]) -> None:
        """Report, store and track the metrics of an evaluation after `step`."""
        self.report.send({"type": "eval", "step": step, "epoch": epoch, "metrics": metrics})
        # The event names non-finite values; in a JSON file they are null.
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._record_everywhere({"step": step, "epoch": epoch, **numbers})

    def _record_everywhere(self, record: dict[str, Any]) -> None:
        if not self.ranks.is_first:
            return
        self.history.append_record(record)
        self.trackers.add_record(record)
        for listener in self.listeners:
            listener(record)

    def append_profile(self, history: History, record: dict[str, Any]) -> None:
        """Append a record to a history with a maximum, unless it is full; report once when it becomes full."""
        if history.is_full or not self.ranks.is_first:
            return
        history.append_record(record)
        if history.is_full:
            self.report.message(f"`{history.name}` is full after step {record['step']:,}; later steps are left out.")

    def report_progress(self, phase: str, done: int, total: int, message: str | None = None) -> None:
        """Report the progress of a phase, at most twice a second and at its end; `message` describes it to users.

        Raises:
            Stopped: a stop was requested.
        """
        self.raise_if_stopped()
        now = time.monotonic()
        if done >= total or now - self._progress_sent_at > _SECONDS_BETWEEN_PROGRESS:
            self._progress_sent_at = now
            self.report.send({"type": "progress", "phase": phase, "done": done, "total": total, "message": message})
