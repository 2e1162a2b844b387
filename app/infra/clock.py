"""Clocks: the wall clock is for timestamps, the time since boot for leases; waits use the monotonic clock."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime

_TOLERANCE_SECONDS = 1.0
_SETTLE_SECONDS = 600.0


def utc_now() -> datetime:
    """Return the current time as an aware datetime in UTC."""
    return datetime.now(UTC)


@dataclass
class ClockWatch:
    """Detects that a wall clock, such as that of the database's host, was set, by this machine's monotonic clock."""

    tolerance_seconds: float
    """Least change that counts, above what is uncertain because of the time that reading the wall clock took."""
    _last: tuple[float, float] | None = None
    """Bounds of the difference between the wall clock and the monotonic one when they were last compared."""

    def observe(self, wall: datetime, sent: float, answered: float) -> float:
        """Compare the clocks: `wall` was read between two monotonic times. Returns the seconds by which it was set.

        0.0 for the first reading, and while the clock was not set.
        """
        bounds = (wall.timestamp() - answered, wall.timestamp() - sent)
        last, self._last = self._last, bounds
        if last is None:
            return 0.0
        is_ahead = bounds[0] - last[1] > self.tolerance_seconds
        is_behind = last[0] - bounds[1] > self.tolerance_seconds
        return (sum(bounds) - sum(last)) / 2 if is_ahead or is_behind else 0.0


class SteadyClock:
    """Wall clock of this process that follows a change of the clock only after ten minutes.

    A clock that is wrong for seconds, until it is corrected, has no effect on it.
    """

    def __init__(self) -> None:
        self._offset = self._changed_offset = time.time() - since_boot()
        """Differences between the wall clock and the time since boot: the one in use, and the latest other one."""
        self._changed_at = 0.0

    def now(self) -> float:
        """Return the seconds since 1970."""
        now = since_boot()
        offset = time.time() - now
        if abs(offset - self._offset) <= _TOLERANCE_SECONDS:
            self._offset = self._changed_offset = offset
        elif abs(offset - self._changed_offset) > _TOLERANCE_SECONDS:
            self._changed_offset, self._changed_at = offset, now
        elif now - self._changed_at > _SETTLE_SECONDS:
            self._offset = offset
        return now + self._offset


def since_boot() -> float:
    """Return the seconds since this machine was booted. Unlike the monotonic clock, they include those of its sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
