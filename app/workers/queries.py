"""Conditions and queries for workers that are online."""

from sqlalchemy import ColumnExpressionArgument, TextClause, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from app.config import Settings
from app.tables.workers import Worker

_FRESH_LEASES = 3

IS_FRESH = "workers.heartbeat_at > clock_timestamp() - make_interval(secs => :silence)"
"""SQL condition: the worker has sent a heartbeat recently enough to count as present; see `silence_seconds`."""


def silence_seconds(lease_seconds: float) -> float:
    """Return the seconds without a heartbeat after which a worker counts as offline."""
    return _FRESH_LEASES * lease_seconds


def is_fresh(lease_seconds: float) -> TextClause:
    """Return the condition `IS_FRESH` for queries on `Worker`."""
    return text(IS_FRESH).bindparams(silence=silence_seconds(lease_seconds))


def online_conditions(settings: Settings, backend: str) -> tuple[ColumnExpressionArgument[bool], ...]:
    """Return the conditions on `Worker` for those that claim runs of this backend now."""
    return (Worker.state == "online", is_fresh(settings.lease_seconds), Worker.backends.contains([backend]))


async def known_labels(session: AsyncSession, backend: str) -> set[str] | None:
    """Return the labels of a backend's workers, also of those that are offline; None if no worker is known."""
    query = select(Worker.labels).distinct().where(Worker.backends.contains([backend]))
    rows = (await session.scalars(query)).all()
    return {label for labels in rows for label in labels} if rows else None
