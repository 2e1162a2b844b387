"""Table of the event log."""

from datetime import datetime

from sqlalchemy import BigInteger, Index, text
from sqlalchemy.dialects.postgresql import JSON
from sqlalchemy.orm import Mapped, mapped_column

from app.models import Base


class RunEvent(Base):
    """Event of a run; `seq` is 1, 2, 3 … per run, without gaps, in commit order."""

    __tablename__ = "run_events"
    __table_args__ = (
        Index("ix_run_events_metric", "run_id", "seq", postgresql_where=text("type IN ('metric', 'eval')")),
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
