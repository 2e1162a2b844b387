"""Automatic repair of a failed run: the changes with which its next attempt continues."""

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.field_types import JsonObject


class Repair(BaseModel):
    """One repair; its JSON form is stored with the attempt that it follows, and is the data of the `repair` event."""

    model_config = ConfigDict(frozen=True)

    kind: str
    """`out_of_memory`, `non_finite` or `loss_spike`."""
    reason: str
    """Sentence for users."""
    step: int | None = None
    """Step that is skipped from now on."""
    rows: list[int] = Field(default_factory=list)
    """Rows of the dataset that make up that step, from 0."""
    singled_out: list[int] = Field(default_factory=list)
    """Those of the rows that fail on their own: no later step may contain one."""
    changes: JsonObject = Field(default_factory=dict)
    """Configuration fields and their new values; `extra.…` for fields of that group."""
    instead_of: JsonObject = Field(default_factory=dict)
    """Previous values of these fields."""
    back_to: str | None = None
    """Checkpoint from which the run continues; None for the start."""
    corrupt_checkpoint: str | None = None
    """Checkpoint after which anomalies occurred too often; no run resumes from it any more."""
