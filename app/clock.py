"""The wall clock, for timestamps only: leases are counted by the database, waits by the monotonic clock."""

from datetime import UTC, datetime


def utc_now() -> datetime:
    """Now, with its zone."""
    return datetime.now(UTC)
