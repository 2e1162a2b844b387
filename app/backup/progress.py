"""Progress reports of a backup and a restore."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Progress(Protocol):
    """Display of messages and of the progress of steps."""

    def say(self, text: str) -> None:
        """Show a message."""

    def step(self, label: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        """Begin a step of `total` bytes; the function that it provides takes the number of bytes done so far."""
