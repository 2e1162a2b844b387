"""Quotas of devices, which API keys and experiments may have."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

DeviceQuota = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
"""Number of devices that runs may use at a time."""


def changes(edit: BaseModel) -> dict[str, Any]:
    """Return the fields that a request changes: those it contains; null removes a quota and keeps everything else."""
    given = edit.model_dump(exclude_unset=True)
    return {name: value for name, value in given.items() if value is not None or name == "max_devices"}
