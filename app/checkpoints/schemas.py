"""Checkpoints on the wire."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.runs.schemas import Moment


class CheckpointEdit(BaseModel):
    """What to change about a checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"example": {"pinned": True}})

    pinned: bool = Field(description="A pinned checkpoint is kept, however many newer ones there are.")


class CheckpointRead(BaseModel):
    """A saved state."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "example": {
                "id": "ckpt_01k3x9m6q2v8s4t0w7y5z1a3b8",
                "run_id": "run_01k3x9m6q2v8s4t0w7y5z1a3b6",
                "attempt": 1,
                "name": "checkpoint-40",
                "step": 40,
                "epoch": 0.2,
                "kind": "periodic",
                "bytes": 1048576,
                "manifest_sha256": "0f" * 32,
                "metrics": {"loss": 2.31, "best_loss": 2.31, "eval_loss": 2.4},
                "is_best": True,
                "save_seconds": 1.8,
                "pinned": False,
                "bad_reason": None,
                "copies": ["local", "remote"],
                "created_at": "2026-01-02T03:04:05.678Z",
            }
        },
    )

    id: str
    run_id: str
    attempt: int
    name: str
    step: int
    epoch: float
    kind: Literal["periodic", "stop", "best", "final"]
    bytes: int
    manifest_sha256: str
    metrics: dict[str, Any] = Field(
        description="`loss`: the last logged one, `best_loss`: the lowest of those; `eval_loss` or `eval_reward` where "
        "an evaluation was of these very weights."
    )
    is_best: bool = Field(
        default=False,
        description="Its evaluation was the best of the good checkpoints: lowest `eval_loss` or highest `eval_reward`.",
    )
    save_seconds: float | None = Field(description="How long it took to write it.")
    pinned: bool
    bad_reason: str | None = Field(description="Why it cannot be resumed, when it was found damaged.")
    copies: list[Literal["local", "remote"]] = Field(
        description="Where it is: `local`, in the storage of the worker that wrote it; `remote`, whole at the "
        "operator's `ANNEAL_CHECKPOINT_URL` too, so that a worker with another storage can go on from it."
    )
    created_at: Moment
