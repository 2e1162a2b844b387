"""Table of actions requested of runs while they train."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base, Owned


class RunAction(Owned, Base):
    """Action to be executed between two steps of a run; actions are executed in id order."""

    __tablename__ = "run_actions"
    __table_args__ = (
        CheckConstraint(
            "action IN ('checkpoint','evaluate','sample','set_learning_rate','extend')", name="action_known"
        ),
        CheckConstraint("status IN ('waiting','done','refused','failed')", name="status_known"),
        CheckConstraint("(status = 'waiting') = (finished_at IS NULL)", name="finished_iff_not_waiting"),
        CheckConstraint("status <> 'done' OR step IS NOT NULL", name="done_at_a_step"),
        Index("ix_run_actions_run_id_id", "run_id", "id"),
        Index("ix_run_actions_waiting", "run_id", postgresql_where=text("status = 'waiting'")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    action: Mapped[str]
    parameters: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    status: Mapped[str] = mapped_column(server_default="waiting")
    """`waiting` until the trainer reports a result; a trigger refuses waiting actions when the run ends."""
    step: Mapped[int | None]
    """Step after which it took effect; an attempt that resumes from an earlier step repeats it there."""
    attempt: Mapped[int | None]
    result: Mapped[dict[str, Any] | None]
    message: Mapped[str | None]
    idempotency_key: Mapped[str | None]
    request_digest: Mapped[str | None]
    finished_at: Mapped[datetime | None]
