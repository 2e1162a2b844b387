"""Field types shared by wire models."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, PlainSerializer, StringConstraints


def timestamp(moment: datetime) -> str:
    """Format a datetime as RFC 3339 in UTC with milliseconds."""
    # `strftime` takes four times as long, and this runs for every event that is read.
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


ModelName = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=300,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@=+-]*(/[A-Za-z0-9_][A-Za-z0-9_.@=+-]*)*$",
    ),
]
"""A folder below the models root, a hub name, or the id of a run."""

PluginName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_.-]+$")]

DatasetFormat = Literal["chat", "prompt_completion", "text", "preference", "prompt"]


class Strict(BaseModel):
    """Base class that rejects unknown fields, `"1"` or true for 1, and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Timestamp = Annotated[datetime, PlainSerializer(timestamp, return_type=str, when_used="json")]
"""Timestamp that serializes as RFC 3339 in UTC with milliseconds."""
