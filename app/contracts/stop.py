"""Stop modes and stop requests."""

from dataclasses import dataclass
from typing import Literal

StopMode = Literal["checkpoint", "epoch_end", "best", "discard"]


@dataclass(frozen=True)
class StopAsked:
    """Request to end the run."""

    save: bool
    finish: bool = False
    """Nothing is saved, but a checkpoint being written is completed: it may be the best one."""


Why = Literal["stop", "drain"]


@dataclass(frozen=True)
class StopRequest:
    """Request to end early.

    `save` asks for a checkpoint first; `why` distinguishes a user's stop from a worker's drain.
    """

    save: bool
    why: Why
    finish: bool = False
    """True if a checkpoint that is being written is still wanted although nothing else is to be saved."""
