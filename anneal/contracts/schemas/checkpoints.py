"""Wire models of checkpoints."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.field_types import GgufType, Timestamp
from anneal.contracts.schemas.runs.common import Label
from anneal.contracts.schemas.short_repr import ShortRepr


class CheckpointEdit(BaseModel):
    """Changes to a checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"example": {"pinned": True}})

    pinned: bool = Field(description="True protects the checkpoint from retention, and its run from deletion.")


class CheckpointExport(BaseModel):
    """Request to export a checkpoint as the output of a run of its own."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"example": {"output": "merged"}})

    output: Literal["adapter", "merged"] | None = Field(
        default=None,
        description="Form of the output of an adapter, as `output` in the configuration; null: that of the run.",
    )
    gguf: GgufType | None = Field(
        default=None,
        description="Also write `model.gguf` with weights of this type, as `gguf` of a run; null: that of the run. "
        "An adapter is then merged, unless `output` is `adapter`.",
    )
    name: Label | None = Field(default=None, description="Name of the new run.")


class CheckpointRead(ShortRepr):
    """Saved training state of a run."""

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
        description="`loss`: last logged loss; `best_loss`: lowest logged loss; `eval_loss` or `eval_reward`: present "
        "if exactly these weights were evaluated."
    )
    is_best: bool = Field(
        default=False,
        description="True for the restorable checkpoint with the lowest `eval_loss` or the highest `eval_reward`.",
    )
    save_seconds: float | None = Field(description="Seconds that saving took.")
    pinned: bool
    bad_reason: str | None = Field(
        description="Reason why the run cannot be resumed from it, if it was found to be corrupt."
    )
    copies: list[Literal["local", "remote"]] = Field(
        description="Locations. `local`: storage of the worker that wrote it. `remote`: all of it is in the object "
        "store of `ANNEAL_STORAGE`, from which any other worker can resume."
    )
    created_at: Timestamp
