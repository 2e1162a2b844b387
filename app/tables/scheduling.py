"""Tables of the plan and pause of the queue, of jobs of a Ray cluster, and of the usage of devices by owner."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base

HOLD_SECONDS = 30.0
"""Seconds after which a plan that was not renewed no longer counts: no API process runs then."""


class QueuePlan(Base):
    """The last plan of the queue: devices and quotas that it holds for runs on several devices. At most one row."""

    __tablename__ = "queue_plan"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, server_default=text("1"))
    holds: Mapped[dict[str, Any]]
    """`app.runs.queue.holds.StoredHolds` without `seconds`."""
    seconds: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    """Its `seconds`, of which a claim reads few."""
    made_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class QueuePause(Base):
    """Pause of the queue; no row: runs start."""

    __tablename__ = "queue_pause"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, server_default=text("1"))
    paused_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    paused_by: Mapped[str]
    """Name of the API key, at that time."""
    reason: Mapped[str | None]


class RayJob(Base):
    """Job of a Ray cluster that was submitted for a pending run, or will be; deleted once it has ended."""

    __tablename__ = "ray_jobs"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Not a foreign key: the job of a deleted run is still to be stopped."""
    lease_epoch: Mapped[int] = mapped_column(primary_key=True)
    """That of the pending run: its next attempt, or loss, has another job."""
    added_at: Mapped[datetime | None] = mapped_column(server_default=func.clock_timestamp())
    """Time at which the job was due; null: the run pauses first."""
    tries: Mapped[int] = mapped_column(server_default=text("0"))
    """Jobs in succession before this one that ended without a worker, and without a failure of their own."""
    left_at: Mapped[datetime | None]
    """Time at which it was found that the run needs this job no more; null: it waits or trains."""


class DeviceUsage(Base):
    """Device-seconds that the runs of an owner have used, of which half are forgotten each week."""

    __tablename__ = "device_usage"

    owner: Mapped[str] = mapped_column(primary_key=True)
    """Id of the API key that created the runs; empty for runs that the service created."""
    device_seconds: Mapped[float]
    """As of `updated_at`."""
    updated_at: Mapped[datetime]
