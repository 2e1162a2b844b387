"""Table of what usage counts of deleted runs, and the attempts of all runs."""

from datetime import datetime
from typing import Any

from sqlalchemy import Date, Float, Select, Update, and_, cast, extract, func, or_, select, update
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.administration.api_keys import ApiKey
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


def attempts_since(since: Any, keys: Select[tuple[str]] | None = None) -> Any:
    """Return a subquery of the attempts of all runs, or of those of `keys`, that have not ended before a time.

    Attempts of deleted runs are among them.
    """
    existing = select_attempts().where(or_(Attempt.ended_at.is_(None), Attempt.ended_at > since))
    deleted = select(*DeletedAttempt.__table__.columns).where(DeletedAttempt.ended_at > since)
    if keys is not None:
        existing, deleted = existing.where(Run.created_by.in_(keys)), deleted.where(DeletedAttempt.created_by.in_(keys))
    return existing.union_all(deleted).subquery("used")


def count_budgets(key_id: str | None = None) -> Update:
    """Count what the keys with a budget, or this one, have used of it since the beginning of the month."""
    month = func.date_trunc("month", func.now(), "UTC")
    keys = select(ApiKey.id).where(ApiKey.max_device_hours.is_not(None), ApiKey.revoked_at.is_(None))
    if key_id is not None:
        keys = keys.where(ApiKey.id == key_id)
    # Those that others are changing are counted the next time: to wait for them could be a deadlock.
    budgeted = keys.with_for_update(skip_locked=True, key_share=True).cte("budgeted")
    used = attempts_since(month, select(budgeted.c.id))
    seconds = func.greatest(cast(extract("epoch", used.c.ended_at - func.greatest(used.c.started_at, month)), Float), 0)
    by_key = (
        select(used.c.created_by, func.sum(used.c.devices * seconds).label("seconds"))
        .group_by(used.c.created_by)
        .subquery()
    )
    counted = {"budget_month": cast(func.timezone("UTC", month), Date), "budget_seconds": by_key.c.seconds}
    is_new = or_(*(getattr(ApiKey, name).is_distinct_from(value) for name, value in counted.items()))
    return update(ApiKey).where(ApiKey.id == by_key.c.created_by, is_new).values(**counted)
