"""What was estimated of a run when it was created."""

from typing import Any

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.models import Base


class StoredEstimate(Base):
    """One for each run; it stays as it was, to be held against what was measured."""

    __tablename__ = "run_estimates"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    estimate: Mapped[dict[str, Any]]
