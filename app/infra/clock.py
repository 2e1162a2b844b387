"""Wall clock, for timestamps only: leases use the database's clock, and waits use the monotonic clock."""

from datetime import UTC, datetime


def utc_now() -> datetime:
    """Return the current time as an aware datetime in UTC."""
    return datetime.now(UTC)
