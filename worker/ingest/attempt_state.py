"""State of an attempt, as far as the output of its training processes says."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from anneal.contracts.attempt.messages import TrainingResult

_TAIL_LINES = 50


@dataclass(frozen=True)
class StartPoint:
    """Position in the run at which an attempt starts."""

    step: int
    epoch: float
    best_loss: float | None
    best_score: float | None = None


@dataclass
class AttemptState:
    """State that the recorders of an attempt write, and that its supervisor reads."""

    result: TrainingResult | None = None
    """Result that the trainer has reported."""
    failed_rank: int = 0
    """Rank on which the failure happened, if the result is one."""
    effective: dict[str, Any] | None = None
    """Configuration that the trainer actually uses, once it has reported it."""
    phase: str = "loading"
    training_started: bool = False
    """True once the trainer has reached its first step, or the evaluation that is its task."""
    last_output_at: float = field(default_factory=time.monotonic)
    """Monotonic time of the last output, of any kind; once training has started, of rank 0.

    Before that, each rank may work for long while rank 0 waits for it. In training, rank 0 is silent then.
    """
    waiting: set[int] = field(default_factory=set)
    """Ranks of this host that wait for others; known until training starts."""
    step: int | None = None
    """Last step that the trainer reported; before that, the one from which it starts."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    """Last lines of the log."""
