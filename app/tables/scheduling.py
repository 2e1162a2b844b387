"""Tables of reservations of devices and of quotas, and of the usage of devices by owner."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, func, text
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base

RESERVATION_SECONDS = 30.0
"""Seconds after which a reservation that was not renewed no longer counts: no API process runs then."""


class Reservation(Base):
    """Worker that keeps devices for a pending run which needs several; one API process renews all of them."""

    __tablename__ = "reservations"
    __table_args__ = (CheckConstraint("devices > 0 AND spare >= 0", name="counts_positive"),)

    worker_id: Mapped[str] = mapped_column(ForeignKey("workers.id", ondelete="CASCADE"), primary_key=True)
    run_id: Mapped[str]
    """Not a foreign key, whose check would lock the run and so hide it from claims."""
    devices: Mapped[int]
    starts_at: Mapped[datetime | None]
    """Time at which so many devices will be free; null if that is unknown."""
    spare: Mapped[int]
    """Further devices that later runs may use, however long."""
    durations: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """Predicted seconds on this worker of runs that may end before `starts_at`, by their id."""
    made_at: Mapped[datetime] = mapped_column(server_default=func.now())


class QuotaReservation(Base):
    """Quota of a key or an experiment of which devices are kept for a pending run; one API process renews all."""

    __tablename__ = "quota_reservations"
    __table_args__ = (CheckConstraint("spare >= 0", name="spare_positive"),)

    quota_id: Mapped[str] = mapped_column(primary_key=True)
    """Id of the key or the experiment."""
    run_id: Mapped[str]
    """Not a foreign key, as in `Reservation`."""
    starts_at: Mapped[datetime | None]
    """Time at which the quota will have room for the run; null if that is unknown."""
    spare: Mapped[int]
    """Further devices of the quota that later runs may use, however long."""
    durations: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """Predicted seconds of runs that may end before `starts_at`, by their id."""
    made_at: Mapped[datetime] = mapped_column(server_default=func.now())


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
