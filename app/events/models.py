"""The event log of runs."""

from datetime import datetime

from sqlalchemy import BigInteger, Index, text
from sqlalchemy.dialects.postgresql import JSON
from sqlalchemy.orm import Mapped, mapped_column

from app.models import Base


class RunEvent(Base):
    """One event of a run. `seq` is 1, 2, 3 … per run, without a gap, in the order of the commits."""

    __tablename__ = "run_events"
    __table_args__ = (
        Index("ix_run_events_metric", "run_id", "seq", postgresql_where=text("type IN ('metric', 'eval')")),
        # Ids sort by time, so a range of run ids is a range of time, and old partitions can be dropped.
        {"postgresql_partition_by": "RANGE (run_id)"},
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    type: Mapped[str]
    attempt: Mapped[int]
    ts: Mapped[datetime]
    # JSON and not JSONB: the text goes to readers as it came, and is read far more often than queried.
    data: Mapped[str] = mapped_column(JSON)
