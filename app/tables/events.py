"""Table of the event log."""

from datetime import UTC, datetime

from sqlalchemy import BigInteger, Identity, Index, text
from sqlalchemy.dialects.postgresql import JSON
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Mapped, mapped_column

from app.infra.ids import id_at
from app.tables.base import Base

_MONTHS_AHEAD = 3
FREQUENT_TYPES = "('log', 'metric', 'device', 'progress', 'distribution')"
"""Event types of which a run has many; the others are its history."""


class RunEvent(Base):
    """Event of a run; `seq` is 1, 2, 3 … per run, without gaps, in commit order."""

    __tablename__ = "run_events"
    __table_args__ = (
        Index("ix_run_events_metric", "run_id", "seq", postgresql_where=text("type IN ('metric', 'eval')")),
        Index("ix_run_events_history", "run_id", "seq", postgresql_where=text(f"type NOT IN {FREQUENT_TYPES}")),
        # Ids sort by time, so a range of run ids is a time range and old partitions can be dropped.
        {"postgresql_partition_by": "RANGE (run_id)"},
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    type: Mapped[str]
    attempt: Mapped[int]
    ts: Mapped[datetime]
    # JSON instead of JSONB: the text is sent to readers unchanged, and read far more often than queried.
    data: Mapped[str] = mapped_column(JSON)


class QueuedFeedEvent(Base):
    """Event that the feed of all runs has not numbered yet; a trigger of `run_events` inserts it."""

    __tablename__ = "event_feed_queue"

    position: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    """Order of insertion; a smaller one may be committed later."""
    run_id: Mapped[str] = mapped_column(index=True)
    seq: Mapped[int] = mapped_column(BigInteger)


class FeedEvent(Base):
    """Event of the feed of all runs; numbers are committed in their order (`app.runs.events.feed`)."""

    __tablename__ = "event_feed"

    number: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    run_id: Mapped[str] = mapped_column(index=True)
    seq: Mapped[int] = mapped_column(BigInteger)


def ensure_partitions(connection: Connection, now: datetime) -> list[str]:
    """Create missing partitions for this month and the following months; return the names created.

    Events that the default partition has of such a month move to its partition: their run was created while the clock
    was ahead, or before the partition existed.
    """
    created = []
    for ahead in range(_MONTHS_AHEAD):
        start, end = _month_start(now, ahead), _month_start(now, ahead + 1)
        name = f"run_events_{start:%Y_%m}"
        if connection.scalar(text("SELECT to_regclass(:name)"), {"name": name}) is None:
            _create_partition(connection, name, id_at("run", start), id_at("run", end))
            created.append(name)
    return created


def _create_partition(connection: Connection, name: str, low: str, high: str) -> None:
    # Names and bounds consist of digits and base32 only and contain no external input.
    bounds = f"FOR VALUES FROM ('{low}') TO ('{high}')"
    inside = f"run_id >= '{low}' AND run_id < '{high}'"
    if not connection.scalar(text(f"SELECT EXISTS (SELECT 1 FROM run_events_default WHERE {inside})")):
        connection.execute(text(f"CREATE TABLE {name} PARTITION OF run_events {bounds}"))
        return
    # Attached after the events have moved: PostgreSQL refuses a partition whose rows are in the default one, and the
    # feed, which a trigger of the partitions fills, must not get them again.
    connection.execute(text(f"CREATE TABLE {name} (LIKE run_events INCLUDING STORAGE)"))
    moved = text(
        f"WITH moved AS (DELETE FROM run_events_default WHERE {inside} RETURNING *) INSERT INTO {name} TABLE moved"
    )
    connection.execute(moved)
    connection.execute(text("LOCK TABLE run_events_default IN ACCESS EXCLUSIVE MODE"))
    connection.execute(moved)  # those that were appended before the lock
    connection.execute(text(f"ALTER TABLE run_events ATTACH PARTITION {name} {bounds}"))


def month_after(start: datetime) -> datetime:
    """Return the start of the next month."""
    return _month_start(start, 1)


def _month_start(now: datetime, ahead: int) -> datetime:
    years, month = divmod(now.month - 1 + ahead, 12)
    return datetime(now.year + years, month + 1, 1, tzinfo=UTC)
