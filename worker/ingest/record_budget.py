"""Rate limit of the records of a training process, which would otherwise fill the database and every reader."""

BYTES_PER_SECOND = 2**20
BURST_BYTES = 16 * 2**20
LEAST_BYTES = 256
"""Size of the smallest records, each of which is a row of the database."""
COSTLY_BYTES = 10 * 2**10
"""Added to the size of a record that costs more than its row: at most 100 of them per second."""


class RecordBudget:
    """Token bucket of the bytes of records; no record is dropped, the process has to wait while it is empty."""

    def __init__(self) -> None:
        self._left = float(BURST_BYTES)
        self._refilled: float | None = None

    def spend_bytes(self, size: int, now: float) -> None:
        """Take the bytes of a record; `now` is in seconds of any clock."""
        self._refill(now)
        self._left -= size

    def is_spent(self, now: float) -> bool:
        """Return True while the bucket is empty."""
        self._refill(now)
        return self._left <= 0

    def _refill(self, now: float) -> None:
        if self._refilled is not None:
            self._left = min(BURST_BYTES, self._left + max(now - self._refilled, 0.0) * BYTES_PER_SECOND)
        self._refilled = now
