"""Table of the parts of runs that several workers train together."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, Index, Integer, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base


class RunPart(Base):
    """Part of an attempt that another worker than the lead trains, with a lease of its own.

    The lead has claimed the run, and its own part is not here: the lease of that part is the run's. Neither key is a
    foreign one: a part outlives the deletion of its run until its devices are free.
    """

    __tablename__ = "run_parts"
    __table_args__ = (
        CheckConstraint("part > 0 AND first_rank > 0", name="follows_the_lead"),
        CheckConstraint("outcome IS NULL OR ended_at IS NOT NULL", name="outcome_of_ended"),
        Index("ix_run_parts_open", "worker_id", postgresql_where=text("ended_at IS NULL")),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    lease_epoch: Mapped[int] = mapped_column(primary_key=True)
    """Lease epoch of the attempt: the part may be renewed only while it is that of the run."""
    part: Mapped[int] = mapped_column(primary_key=True)
    """Number of the part; the lead's would be 0."""
    worker_id: Mapped[str]
    first_rank: Mapped[int]
    device_indexes: Mapped[list[int]] = mapped_column(ARRAY(Integer))
    """Devices of the worker, one for each rank from `first_rank` on."""
    lease_expires_at: Mapped[datetime]
    meeting: Mapped[str | None]
    """Address and port where the ranks meet; null until the lead has prepared the attempt."""
    job: Mapped[dict[str, Any] | None]
    """Job of the lead, from which the worker makes its own if the hosts share no folder."""
    is_leaving: Mapped[bool] = mapped_column(server_default="false")
    """True: the worker is shutting down, so the run is to save and return to the queue."""
    activity: Mapped[dict[str, Any] | None]
    """`anneal.contracts.attempt.part_activity.PartActivity`, as of the last renewal."""
    ended_at: Mapped[datetime | None]
    """Time at which no process of the part was left, or was known to be dead."""
    outcome: Mapped[dict[str, Any] | None]
    """`anneal.contracts.attempt.part_end.PartEnd`; null: its worker was lost."""
