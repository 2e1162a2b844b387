"""Limit on failed authentications per address."""

import time
from collections import OrderedDict

_FAILURE_BURST = 20

_FAILURE_INTERVAL_SECONDS = 3.0

_MAX_ADDRESSES = 10_000


class FailureLimit:
    """Rate limit on wrong keys per address: a burst of 20, then one every 3 seconds."""

    def __init__(self) -> None:
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def exhausted(self, address: str) -> bool:
        """Return True if this address has no attempts left for now."""
        return self._level(address) > _FAILURE_BURST - 1

    def count(self, address: str) -> None:
        """Record a wrong key from this address."""
        level = self._level(address) + 1
        self._spent[address] = (level, time.monotonic())
        self._spent.move_to_end(address)
        while len(self._spent) > _MAX_ADDRESSES:
            self._spent.popitem(last=False)

    def _level(self, address: str) -> float:
        level, since = self._spent.get(address, (0.0, 0.0))
        return max(0.0, level - (time.monotonic() - since) / _FAILURE_INTERVAL_SECONDS)
