"""Monthly partitions of the event log, so that retention drops a table instead of deleting rows."""

from datetime import UTC, datetime

from sqlalchemy import text
from sqlalchemy.engine import Connection

from app.ids import id_at

_MONTHS_AHEAD = 3


def ensure_partitions(connection: Connection, now: datetime) -> list[str]:
    """Create missing partitions for this month and the following months; return the names created."""
    created = []
    for ahead in range(_MONTHS_AHEAD):
        start, end = _month(now, ahead), _month(now, ahead + 1)
        name = f"run_events_{start:%Y_%m}"
        if connection.scalar(text("SELECT to_regclass(:name)"), {"name": name}) is None:
            # Names and bounds consist of digits and base32 only and contain no external input.
            connection.execute(
                text(
                    f"CREATE TABLE {name} PARTITION OF run_events "
                    f"FOR VALUES FROM ('{id_at('run', start)}') TO ('{id_at('run', end)}')"
                )
            )
            created.append(name)
    return created


def month_after(start: datetime) -> datetime:
    """Return the start of the next month."""
    return _month(start, 1)


def _month(now: datetime, ahead: int) -> datetime:
    years, month = divmod(now.month - 1 + ahead, 12)
    return datetime(now.year + years, month + 1, 1, tzinfo=UTC)
