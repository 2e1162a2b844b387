"""Statuses of a run."""

from enum import StrEnum

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


STATUSES = ("pending", *LIVE, *TERMINAL)
