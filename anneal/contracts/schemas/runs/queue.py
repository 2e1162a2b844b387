"""Wire models of the queue and its pause."""

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from anneal.contracts.field_types import Timestamp
from anneal.contracts.schemas.runs.common import Label

_PAUSE: dict[str, JsonValue] = {
    "paused_at": "2026-01-02T03:04:05.678Z",
    "paused_by": "ada",
    "reason": "new cooling for rack 3",
}


class QueuePauseRequest(BaseModel):
    """Request to pause the queue."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"reason": "new cooling for rack 3"}})

    reason: Label | None = Field(default=None, description="Reason, which every run that waits shows.")


class PauseRead(BaseModel):
    """Pause of the queue."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"example": _PAUSE})

    paused_at: Timestamp
    paused_by: str = Field(description="Name of the key, at that time.")
    reason: str | None


class QueueRead(BaseModel):
    """State of the queue."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"paused": True, "pause": _PAUSE, "pending": 12, "live": 4}}
    )

    paused: bool = Field(description="True: no run starts.")
    pause: PauseRead | None = Field(description="Null: runs start.")
    pending: int = Field(description="Runs that wait.")
    live: int = Field(description="Runs that train, or do another task.")
