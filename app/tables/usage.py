"""Table of what usage counts of deleted runs, and the attempts of all runs."""

from datetime import datetime
from typing import Any

from sqlalchemy import Float, Select, and_, cast, func, or_, select
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base
from app.tables.runs import Attempt, AttemptTimings, Run

CPU = "cpu"
"""`device` of an attempt on CPUs, which all count as alike."""


class DeletedAttempt(Base):
    """Attempt of a deleted run: what usage counts of it."""

    __tablename__ = "deleted_attempts"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    created_by: Mapped[str | None]
    experiment_id: Mapped[str]
    method: Mapped[str]
    base_model: Mapped[str]
    device: Mapped[str | None]
    devices: Mapped[int]
    tokens: Mapped[float]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime] = mapped_column(index=True)


def select_attempts() -> Select[*tuple[Any, ...]]:
    """Select the attempts of the runs that exist, with the columns of `DeletedAttempt`; live ones last until now."""
    tokens = func.coalesce(cast(AttemptTimings.timings["tokens"].astext, Float), 0.0)
    query = select(
        Attempt.run_id, Attempt.attempt, Run.created_by, Run.experiment_id, Run.method, Run.base_model, Attempt.device,
        Run.devices_needed.label("devices"), tokens.label("tokens"), Attempt.started_at,
        func.coalesce(Attempt.ended_at, func.now()).label("ended_at"),
    )  # fmt: skip
    timed = and_(AttemptTimings.run_id == Attempt.run_id, AttemptTimings.attempt == Attempt.attempt)
    return query.join(Run, Run.id == Attempt.run_id).outerjoin(AttemptTimings, timed)


def attempts_since(since: Any) -> Any:
    """Return a subquery of the attempts of all runs that have not ended before a time, those of deleted runs too."""
    existing = select_attempts().where(or_(Attempt.ended_at.is_(None), Attempt.ended_at > since))
    deleted = select(*DeletedAttempt.__table__.columns).where(DeletedAttempt.ended_at > since)
    return existing.union_all(deleted).subquery("used")
