"""What a run remembers beside the trainer's own state: saved in every checkpoint, restored on resume."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.runs.config import TrainingConfig

FILE = "anneal_state.json"
METRICS = "metrics.jsonl"
DISTRIBUTIONS = "distributions.jsonl"
MEMORY = "memory_profile.jsonl"
MOST_RECORDS = {DISTRIBUTIONS: 1000, MEMORY: 10_000}
"""What is written at every step goes into every checkpoint, and a run may have millions of steps."""


@dataclass
class RunState:
    """Loop state that shows in metrics and decisions, so that a resumed run goes on as if never interrupted."""

    run_id: str = ""
    first_step: int = 0
    """Step at which this run took up training; above 0 when it continues another run."""
    ended_by: str | None = None
    """What ended training at this very step, if anything did: early_stopping, time_limit, stop, …"""
    losses: list[float] = field(default_factory=list)
    """Exact losses of the steps since the last metric."""
    averages: dict[str, list[float]] = field(default_factory=dict)
    """The trainer's own per-batch measures (token accuracy, entropy) since the last metric."""
    tokens: int = 0
    """Tokens trained on, padding left out."""
    samples: int = 0
    """Rows of the data set trained on, repetitions counted."""
    seconds: float = 0.0
    """Time in training, all attempts of this run together."""
    loss: float | None = None
    """Of the last step."""
    recent_losses: list[float] = field(default_factory=list)
    """Of the last steps that were trained on: what a leap of the loss is measured against."""
    bad_rows: list[int] = field(default_factory=list)
    """Rows of the data set that no step may hold: found to spoil one."""
    best_loss: float | None = None
    """Lowest logged training loss."""
    objective: float | None = None
    """What the last evaluation found of the measure that tells good checkpoints from bad; it was at `eval_step`."""
    eval_step: int | None = None
    best_objective: float | None = None
    best_saved: float | None = None
    """The best of those evaluations whose weights have a checkpoint, or are about to have one."""
    best_saved_before: float | None = None
    """What that was before the last one."""
    evals_without_gain: int = 0
    eval_pending: bool = False
    """The evaluation due after this step has not been done: a stop came first."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration that actions have changed while this run trained, and their values now."""
    total_steps: int | None = None
    """Steps in all, once an action has extended the run."""
    last_metric: dict[str, Any] = field(default_factory=dict)
    """Step, epoch and loss as logged last."""

    def save(self, folder: Path) -> None:
        """Write it into a checkpoint; floats survive exactly."""
        (folder / FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path, run_id: str, step: int) -> "RunState":
        """Read that of a checkpoint at `step`; a new run that continues another starts its own clock and limits."""
        told = json.loads((folder / FILE).read_text())
        # Versions that did not tell the two apart left no checkpoint out.
        state = cls(**{"best_saved": told["best_objective"], **told})
        if state.run_id != run_id:
            state.run_id, state.first_step = run_id, step
            state.seconds, state.ended_by = 0.0, None
            state.changed, state.total_steps = {}, None  # the new run's configuration has them
        return state

    def evaluate(self, found: float, step: int, higher_is_better: bool) -> bool:
        """Take in what an evaluation after `step` found; whether a checkpoint of it would be the best there is."""

        def is_better_than(best: float | None) -> bool:
            return best is None or (found > best if higher_is_better else found < best)

        self.objective, self.eval_step = found, step
        if is_better_than(self.best_objective):
            self.best_objective, self.evals_without_gain = found, 0
        else:
            self.evals_without_gain += 1
        if not is_better_than(self.best_saved):
            return False
        self.best_saved, self.best_saved_before = found, self.best_saved
        return True

    def left_out(self, step: int) -> None:
        """The weights of `step` get no checkpoint: so they are not to be the best that others are held against."""
        if self.eval_step == step and self.best_saved == self.objective:
            self.best_saved = self.best_saved_before

    def limit_reached(self, config: TrainingConfig, step: int) -> str | None:
        """What ends this run after `step`, its last step aside: a limit of its own, or that it got no better."""
        if self.ended_by in ("early_stopping", "epoch_end"):
            return self.ended_by
        if config.time_limit_seconds is not None and self.seconds >= config.time_limit_seconds:
            return "time_limit"
        # A run that takes up another behind the step where that one was to stop is meant to go on.
        if config.stop_at_step is not None and self.first_step < config.stop_at_step <= step:
            return "stop_at_step"
        return None


class History:
    """A file of an attempt with a line for each thing of a kind since the first step of the training.

    `metrics.jsonl` has metrics and evaluations. On disk and never in memory, since a long run has very many.
    Of those with a bound every second line goes when it is reached, and so on: the rest stays evenly spaced.
    """

    def __init__(self, folder: Path, name: str = METRICS) -> None:
        self._path = folder / name
        self._most = MOST_RECORDS.get(name)
        self._count = 0
        self._spacing = 1
        """Steps that this power of two divides are kept."""

    def begin(self, checkpoint: Path | None) -> None:
        """Start with the lines of a checkpoint, or with none."""
        if checkpoint is None:
            self._path.unlink(missing_ok=True)
        else:
            shutil.copyfile(checkpoint / self._path.name, self._path)
        if self._most is not None:
            steps = [json.loads(line)["step"] for line in self._lines()]
            self._count = len(steps)
            # The spacing shows in what is left, of which there is always more than a quarter.
            common = math.gcd(*steps)
            self._spacing = common & -common if len(steps) > self._most // 4 else 1

    def wants(self, step: int) -> bool:
        """Whether a line about this step would be kept."""
        return step % self._spacing == 0

    def append(self, record: dict[str, Any]) -> None:
        """Add a line, if it is wanted; floats survive exactly."""
        if self._most is not None and not self.wants(record["step"]):
            return
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._count += 1
        while self._most is not None and self._count > self._most and self._spacing <= record["step"]:
            self._spacing *= 2
            self._thin()

    def _thin(self) -> None:
        thinned = self._path.with_suffix(".thinned")
        self._count = 0
        with thinned.open("w") as file:
            for line in self._lines():
                if self.wants(json.loads(line)["step"]):
                    file.write(line)
                    self._count += 1
        thinned.replace(self._path)

    def _lines(self) -> Iterator[str]:
        if self._path.exists():
            with self._path.open() as file:
                yield from file

    def copy_to(self, folder: Path) -> None:
        """Put all lines so far into a checkpoint or an output; without any, an empty file."""
        self.held()(folder)

    def held(self) -> Callable[[Path], None]:
        """Hold on to all lines so far: what it answers puts them into a folder, whatever comes to them meanwhile."""
        self._path.touch()
        file, name = self._path.open("rb"), self._path.name
        size = os.fstat(file.fileno()).st_size

        def put(folder: Path) -> None:
            left = size
            with file, (folder / name).open("wb") as copy:
                while left and (piece := file.read(min(left, 1 << 20))):
                    copy.write(piece)
                    left -= len(piece)

        return put

    def records(self) -> list[dict[str, Any]]:
        """All lines so far."""
        self._path.touch()
        return [json.loads(line) for line in self._path.read_text().splitlines()]
