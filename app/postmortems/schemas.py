"""Post-mortems on the wire."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.runs.config import TrainingStatus
from app.runs.schemas import RUN_ID, Moment


class MemoryPoint(BaseModel):
    """The memory of an attempt at one moment."""

    seconds: float = Field(description="Since the attempt's start.")
    phase: str
    host_mb: int = Field(description="Of the training process and all that it started.")
    host_free_mb: int
    device_mb: int | None = Field(default=None, description="All that is in use on the GPU.")
    device_free_mb: int | None = None


class AttemptEnd(BaseModel):
    """How one attempt ended."""

    attempt: int
    worker_id: str
    started_at: Moment
    ended_at: Moment | None
    outcome: str | None = Field(description="completed, failed, cancelled, lost, handed_back, retried or repaired.")
    phase: str | None = Field(description="What it was doing; null where nobody saw.")
    step: int | None
    exit_code: int | None
    exit_signal: str | None = Field(description="Such as SIGKILL.")
    repair: dict[str, Any] | None = Field(description="What the next attempt did otherwise.")


class CorrectedRequest(BaseModel):
    """A request that can be sent as it is."""

    method: Literal["POST"] = "POST"
    path: str
    body: dict[str, Any]


class Correction(BaseModel):
    """What to change."""

    changes: dict[str, Any] = Field(description="Fields of the configuration and their new values.")
    config: dict[str, Any] = Field(description="The configuration with them, as it can be posted.")
    request: CorrectedRequest = Field(
        description="Resumes the run where that is possible with these changes, and makes a new one otherwise."
    )


class PostMortem(BaseModel):
    """Why a run ended, or an attempt of it, as far as it is known."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "run_id": RUN_ID, "status": "failed", "code": "out_of_memory",
                "message": "Out of memory: CUDA out of memory. Lower `batch_size` …", "attempt": 4, "phase": "training",
                "step": 120, "exit_code": 1, "exit_signal": None, "killed_by_kernel": False,
                "probable_cause": "The memory of the device did not suffice while training: shortly before, 23,100 MB "
                "were in use and 410 MB free.",
                "advice": "Rows that are longer are cut, or left out.",
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
    code: str | None = Field(description="Error code of the run; null while it goes on, or has ended well after all.")
    message: str | None
    attempt: int | None = Field(description="The attempt that this is about: the last one that went wrong.")
    phase: str | None
    step: int | None
    exit_code: int | None
    exit_signal: str | None
    killed_by_kernel: bool = Field(description="The machine had no memory left, and the kernel chose this process.")
    probable_cause: str
    advice: str | None
    peaks: dict[str, int] = Field(description="Highest `host_mb` and `device_mb` of that attempt.")
    memory: list[MemoryPoint] = Field(description="Timeline of that attempt; empty where nobody saw.")
    last_lines: list[str] = Field(description="What it printed last.")
    attempts: list[AttemptEnd] = Field(description="All of them, the first one first.")
    correction: Correction | None = Field(description="Null where no other configuration is known to help.")
