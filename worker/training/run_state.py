"""State of a run beyond the trainer's own: saved in every checkpoint, restored on resume."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anneal.contracts.training_config.fields import TrainingConfig
from worker.wire.waiting_bytes import WaitingBytes

FILE = "anneal_state.json"
METRICS = "metrics.jsonl"
DISTRIBUTIONS = "distributions.jsonl"
MEMORY = "memory_profile.jsonl"
MOST_RECORDS = {DISTRIBUTIONS: 1000, MEMORY: 10_000}
"""Maximum number of records, the first ones: the files are part of every checkpoint."""


@dataclass
class RunState:
    """Loop state that affects metrics and decisions; with it, a resumed run continues as if never interrupted."""

    run_id: str = ""
    first_step: int = 0
    """Step at which this run started training; above 0 if it continues another run."""
    ended_by: str | None = None
    """Reason that ended training at exactly this step, if any: early_stopping, time_limit, stop, …"""
    losses: list[float] = field(default_factory=list)
    """Exact losses of the steps since the last metric."""
    averages: dict[str, list[float]] = field(default_factory=dict)
    """The trainer's own per-batch metrics (token accuracy, entropy) since the last metric record."""
    tokens: int = 0
    """Tokens trained on, without padding."""
    samples: int = 0
    """Dataset rows trained on, counting repetitions."""
    seconds: float = 0.0
    """Time in training, summed over all attempts of this run."""
    loss: float | None = None
    """Loss of the last step."""
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last steps that were trained on, against which loss spikes are measured."""
    bad_rows: list[int] = field(default_factory=list)
    """Dataset rows that no step may contain, because they were found to make a step bad."""
    best_loss: float | None = None
    """Lowest logged training loss."""
    objective: float | None = None
    """Metric that ranks checkpoints, at the last evaluation, which was at `eval_step`."""
    eval_step: int | None = None
    best_objective: float | None = None
    best_saved: float | None = None
    """Best objective of the evaluations whose weights have a checkpoint, or are about to have one."""
    best_saved_before: float | None = None
    """Previous value of `best_saved`."""
    evals_without_improvement: int = 0
    eval_pending: bool = False
    """True if the evaluation due after this step was not done because a stop came first."""
    samples_pending: bool = False
    """True if the samples due after this step were not generated because a stop came first."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Configuration fields that actions changed during this run, with their current values."""
    total_steps: int | None = None
    """Total number of steps, if an action extended the run."""
    last_metric: dict[str, Any] = field(default_factory=dict)
    """Step, epoch and loss as last logged."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """States of the installed callbacks, by position and name."""
    equal_reward_steps: int = 0
    """Steps in a row up to the last metric in which the completions of each prompt had equal rewards."""
    reward_usage: dict[str, int] = field(default_factory=dict)
    """Cost of rewards that are calls over HTTP so far, by metric; empty without such rewards."""

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint; floats are preserved exactly."""
        (folder / FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path, run_id: str, step: int) -> "RunState":
        """Read the state of a checkpoint at `step`.

        A new run that continues another one starts with its own clock and limits.
        """
        stored = json.loads((folder / FILE).read_text())
        # Versions that did not distinguish the two never skipped a checkpoint.
        state = cls(**{"best_saved": stored["best_objective"], **stored})
        if state.run_id != run_id:
            state.run_id, state.first_step = run_id, step
            state.seconds, state.ended_by, state.reward_usage = 0.0, None, {}
            state.changed, state.total_steps = {}, None  # the new run's configuration has them
        return state

    def record_objective(self, objective: float, step: int, higher_is_better: bool) -> bool:
        """Store the objective after `step`; return True if a checkpoint of this step would be the best one."""

        def is_better_than(best: float | None) -> bool:
            return best is None or (objective > best if higher_is_better else objective < best)

        self.objective, self.eval_step = objective, step
        if is_better_than(self.best_objective):
            self.best_objective, self.evals_without_improvement = objective, 0
        else:
            self.evals_without_improvement += 1
        if not is_better_than(self.best_saved):
            return False
        self.best_saved, self.best_saved_before = objective, self.best_saved
        return True

    def left_out(self, step: int) -> None:
        """Undo `best_saved` if the weights of `step` get no checkpoint, so that later ones are not compared to them."""
        if self.eval_step == step and self.best_saved == self.objective:
            self.best_saved = self.best_saved_before

    def limit_reached(self, config: TrainingConfig, step: int) -> str | None:
        """Return the reason to end this run after `step`, other than its last step: a limit, or early stopping."""
        if self.ended_by in ("early_stopping", "callback", "epoch_end"):
            return self.ended_by
        if config.time_limit_seconds is not None and self.seconds >= config.time_limit_seconds:
            return "time_limit"
        # A run that continues another one at or after that one's stop step is meant to go on.
        if config.stop_at_step is not None and self.first_step < config.stop_at_step <= step:
            return "stop_at_step"
        return None


class History:
    """File of an attempt with one line per record of a kind since the first step of training.

    `metrics.jsonl` has metrics and evaluations. Records are never kept in memory, since a long run has very many.
    """

    def __init__(self, folder: Path, name: str = METRICS) -> None:
        self.name = name
        self._path = folder / name
        self._max_records = MOST_RECORDS.get(name)
        self._count = 0
        self._waiting = WaitingBytes()

    def start_from(self, checkpoint: Path | None) -> None:
        """Start with the lines of a checkpoint, or with none."""
        if checkpoint is None:
            self._path.write_bytes(b"")
        else:
            shutil.copyfile(checkpoint / self._path.name, self._path)
        with self._path.open("rb") as file:
            self._count = sum(1 for _ in file)

    @property
    def is_full(self) -> bool:
        """True if the file has a maximum and has reached it."""
        return self._max_records is not None and self._count >= self._max_records

    def append_record(self, record: dict[str, Any]) -> None:
        """Append a line; floats are preserved exactly. While the disk is full, lines wait in memory."""
        with self._path.open("ab", buffering=0) as file:
            self._waiting.append(file.fileno(), (json.dumps(record) + "\n").encode())
        self._count += 1

    def copy_to(self, folder: Path) -> None:
        """Write all lines so far into a checkpoint or an output; without any, an empty file."""
        self.capture_lines()(folder)

    def capture_lines(self) -> Callable[[Path], None]:
        """Capture all lines so far.

        Returns a function that writes them into a folder, even if more lines were appended meanwhile.
        """
        self._path.touch()
        file, name = self._path.open("rb"), self._path.name
        size, waiting = os.fstat(file.fileno()).st_size, bytes(self._waiting)

        def write_copy(folder: Path) -> None:
            left = size
            with file, (folder / name).open("wb") as copy:
                while left and (piece := file.read(min(left, 1 << 20))):
                    copy.write(piece)
                    left -= len(piece)
                copy.write(waiting)

        return write_copy

    def records(self) -> list[dict[str, Any]]:
        """Return all lines so far."""
        self._path.touch()
        return [json.loads(line) for line in (self._path.read_bytes() + bytes(self._waiting)).splitlines()]
