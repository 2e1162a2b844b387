"""Limit on how often something may happen, for each of many names."""

import time
from collections import OrderedDict

_MAX_NAMES = 10_000


class RateLimit:
    """Token bucket for each name: `burst` at once, then one every `seconds`."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst = burst
        self._seconds = seconds
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def is_exhausted(self, name: str) -> bool:
        """Return True if this name has none left for now."""
        return self._current_level(name) > self._burst - 1

    def count_attempt(self, name: str) -> None:
        """Record one of this name."""
        level = self._current_level(name) + 1
        self._spent[name] = (level, time.monotonic())
        self._spent.move_to_end(name)
        while len(self._spent) > _MAX_NAMES:
            self._spent.popitem(last=False)

    def _current_level(self, name: str) -> float:
        level, since = self._spent.get(name, (0.0, 0.0))
        return max(0.0, level - (time.monotonic() - since) / self._seconds)
