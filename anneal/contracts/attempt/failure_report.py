"""Failure report of an attempt, which the worker stores with it and a post-mortem explains."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.attempt.messages import ErrorInfo
from anneal.contracts.attempt.repair import Repair

KillReason = Literal["stop", "drain", "lease", "hang"]
"""Reason for which a worker kills a training process."""


class MemoryPoint(BaseModel):
    """Memory use of an attempt at one time."""

    seconds: float = Field(description="Seconds since the start of the attempt.")
    phase: str
    host_mb: int = Field(description="Host memory of the training process and its child processes.")
    host_free_mb: int
    device_mb: int | None = Field(default=None, description="GPU memory in use by all processes.")
    device_free_mb: int | None = None


class FailureReport(BaseModel):
    """Exit status, memory timeline and last log lines of an attempt; the defaults mean that nothing was observed."""

    model_config = ConfigDict(frozen=True)

    exit_code: int | None = None
    exit_signal: int | None = None
    rank: int | None = None
    """Rank of the process whose end this is; None where there was one process."""
    killed_by_kernel: bool = False
    """True if the machine ran out of memory and the kernel killed the process."""
    killed_for: KillReason | None = None
    """Reason for which the worker killed the process."""
    phase: str | None = None
    step: int | None = None
    error: ErrorInfo | None = None
    """Error that the training process reported."""
    peaks: dict[str, int] = Field(default_factory=dict)
    """Peak `host_mb` and `device_mb`."""
    memory: list[MemoryPoint] = Field(default_factory=list)
    """Memory timeline, oldest first."""
    last_lines: list[str] = Field(default_factory=list)
    repair: Repair | None = None
    """Repair with which the next attempt continues."""
