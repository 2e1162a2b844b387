"""Device that a worker assigns to a training process."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AssignedDevice:
    """Kind, index and id of a device."""

    kind: Literal["cpu", "cuda"]
    index: int
    id: str
    """`cpu-0`, or the UUID of a GPU."""
