"""What a run remembers beside the trainer's own state: saved in every checkpoint, restored on resume."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = "anneal_state.json"
METRICS = "metrics.jsonl"


@dataclass
class RunState:
    """Loop state that shows in metrics and decisions, so that a resumed run goes on as if never interrupted."""

    run_id: str = ""
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
    best_loss: float | None = None
    """Lowest logged training loss."""
    best_eval_loss: float | None = None
    evals_without_gain: int = 0
    eval_pending: bool = False
    """The evaluation due after this step has not been done: a stop came first."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Every metric and evaluation so far, as they go into `metrics.jsonl`."""

    def save(self, folder: Path) -> None:
        """Write both files into a checkpoint; floats survive exactly."""
        fields = {name: value for name, value in asdict(self).items() if name != "history"}
        (folder / FILE).write_text(json.dumps(fields))
        self.write_history(folder)

    def write_history(self, folder: Path) -> None:
        """Write `metrics.jsonl`, a line for each metric and evaluation."""
        (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in self.history))

    @classmethod
    def load(cls, folder: Path, run_id: str) -> "RunState":
        """Read a checkpoint's; a new run that continues another starts its own clock."""
        state = cls(**json.loads((folder / FILE).read_text()))
        state.history = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        if state.run_id != run_id:
            state.run_id = run_id
            state.seconds = 0.0
        return state
