"""Statuses of runs, and orders of their lists."""

from enum import StrEnum
from typing import Literal

LIVE = ("initializing", "running", "checkpointing")

TERMINAL = ("completed", "failed", "cancelled")


class TrainingStatus(StrEnum):
    """Status of a run; a request to stop is not a status."""

    pending = "pending"
    initializing = "initializing"
    running = "running"
    checkpointing = "checkpointing"
    completed = "completed"
    failed = "failed"
    cancelled = "cancelled"


EndReason = Literal["finished", "early_stopping", "callback", "time_limit", "stop_at_step"]
"""Reason for which a completed run ended: its last step, a limit of its configuration, or an installed callback."""

STATUSES = ("pending", *LIVE, *TERMINAL)

RunSort = Literal["created_at", "live", "best", "name", "best_loss", "best_eval", "step", "seconds", "learning_rate"]
"""Orders of a list of runs."""
