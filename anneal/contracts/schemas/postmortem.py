"""Wire models of post-mortems."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.attempt.failure_report import MemoryPoint
from anneal.contracts.field_types import Timestamp
from anneal.contracts.run_status import TrainingStatus
from anneal.contracts.schemas.runs.common import RUN_ID
from anneal.contracts.schemas.short_repr import ShortRepr


class AttemptEnd(BaseModel):
    """End of one attempt."""

    attempt: int
    worker_id: str
    started_at: Timestamp
    ended_at: Timestamp | None
    outcome: str | None = Field(description="completed, failed, cancelled, lost, handed_back, retried or repaired.")
    phase: str | None = Field(description="Phase in which it ended; null if not observed.")
    step: int | None
    exit_code: int | None
    exit_signal: str | None = Field(description="Signal that ended the process, such as SIGKILL.")
    repair: dict[str, Any] | None = Field(description="Changes that the next attempt made to repair the run.")


class CorrectedRequest(BaseModel):
    """Request that can be sent without changes."""

    method: Literal["POST"] = "POST"
    path: str
    body: dict[str, Any]


class Correction(BaseModel):
    """Advised configuration changes."""

    changes: dict[str, Any] = Field(description="Configuration fields and their new values.")
    config: dict[str, Any] = Field(description="Complete configuration with the changes applied.")
    request: CorrectedRequest = Field(
        description="Request that resumes the run if that is possible with these changes, or else creates a new run."
    )


class PostMortem(ShortRepr):
    """Known reasons for the end of a run or of one of its attempts."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "run_id": RUN_ID, "status": "failed", "code": "out_of_memory",
                "message": "Out of memory: CUDA out of memory. Lower `batch_size` …", "attempt": 4, "phase": "training",
                "step": 120, "exit_code": 1, "exit_signal": None, "killed_by_kernel": False,
                "probable_cause": "The device ran out of memory while training: shortly before, 23,100 MB "
                "were in use and 410 MB free.",
                "advice": "Longer rows are truncated or dropped.",
                "peaks": {"host_mb": 5120, "device_mb": 23900},
                "memory": [
                    {"seconds": 2.0, "phase": "training", "host_mb": 5120, "host_free_mb": 90000, "device_mb": 23100,
                     "device_free_mb": 410},
                ],
                "last_lines": ["step 119"],
                "attempts": [],
                "correction": {
                    "changes": {"max_seq_length": 1024},
                    "config": {"base_model": "my-model", "max_seq_length": 1024},
                    "request": {"method": "POST", "path": "/v1/runs", "body": {}},
                },
            }
        }
    )  # fmt: skip

    run_id: str
    status: TrainingStatus
    code: str | None = Field(
        description="Error code of the run; null if the run has not ended, or ended without an error."
    )
    message: str | None
    attempt: int | None = Field(description="Attempt that this post-mortem describes: the last unsuccessful one.")
    phase: str | None
    step: int | None
    exit_code: int | None
    exit_signal: str | None
    killed_by_kernel: bool = Field(
        description="True if the machine ran out of memory and the kernel killed this process."
    )
    probable_cause: str
    advice: str | None
    peaks: dict[str, int] = Field(description="Peak `host_mb` and `device_mb` of the attempt.")
    memory: list[MemoryPoint] = Field(description="Memory timeline of the attempt; empty if not observed.")
    last_lines: list[str] = Field(description="Last lines that the attempt printed.")
    attempts: list[AttemptEnd] = Field(description="All attempts, oldest first.")
    correction: Correction | None = Field(description="Advised changes; null if none are known to help.")
