"""Table of the estimates stored at run creation."""

from typing import Any

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.models import Base


class StoredEstimate(Base):
    """Estimate of a run; one per run, never updated, for comparison with measurements."""

    __tablename__ = "run_estimates"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    estimate: Mapped[dict[str, Any]]
