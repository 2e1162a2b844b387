"""Stop modes and stop requests: one type from the API's request to the training loop."""

from dataclasses import dataclass
from typing import Literal

StopMode = Literal["checkpoint", "epoch_end", "best", "discard"]

StopReason = Literal["stop", "drain"]
"""`stop`: a user ends the run; `drain`: the worker shuts down, and the run continues in another attempt."""

_SAVES_LESS: tuple[StopMode, ...] = ("checkpoint", "best", "discard")
"""Modes of immediate stops; each saves less than the one before it."""


@dataclass(frozen=True)
class StopRequest:
    """Request to end training early."""

    mode: StopMode
    """`checkpoint`: save and end. `epoch_end`: train to the end of the epoch, save and end. `best`: save nothing, but
    complete a checkpoint that is being written, since it may be the best one. `discard`: end without saving."""
    why: StopReason = "stop"
    grace_seconds: float | None = None
    """Seconds from the request to the trainer until it is killed; None: those of the worker's settings."""

    @property
    def is_immediate(self) -> bool:
        """True if training ends after the current step, and not with the epoch."""
        return self.mode != "epoch_end"

    @property
    def saves_checkpoint(self) -> bool:
        """True if a checkpoint of the last step is saved before the end."""
        return self.mode in ("checkpoint", "epoch_end")

    def combined_with(self, earlier: "StopRequest | None") -> "StopRequest":
        """Return the immediate stop in effect after `earlier` and this one.

        A user's stop outranks a drain, and a request that saves less outranks one that saves more.
        """
        if earlier is None:
            return self
        mode = max(earlier.mode, self.mode, key=_SAVES_LESS.index)
        grace = self.grace_seconds if self.grace_seconds is not None else earlier.grace_seconds
        return StopRequest(mode, "stop" if "stop" in (earlier.why, self.why) else "drain", grace)
