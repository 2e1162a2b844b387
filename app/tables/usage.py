"""Tables of usage, and the statements that add up and read it.

Usage of an attempt that has ended is added to `daily_usage` once. All usage is that, and what the attempts that are not
counted yet have used: those that live, and those that have ended since the last count.
"""

from datetime import date, datetime
from typing import Any

from sqlalchemy import (
    ARRAY,
    Date,
    DateTime,
    Float,
    Index,
    Select,
    Text,
    Update,
    and_,
    cast,
    column,
    extract,
    func,
    literal,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import array, insert
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.administration.api_keys import ApiKey
from app.tables.base import Base
from app.tables.runs import Attempt, AttemptTimings, Run

CPU = "cpu"
"""`device` of an attempt on CPUs, which all count as alike."""
_MOST_TOKENS = 1e18
"""Tokens of one attempt that usage counts at most."""
_DAY = text("interval '1 day'")
_GROUPS = [text(number) for number in ("1", "2", "3", "4")]


class DeletedAttempt(Base):
    """Attempt of a deleted run: what usage counts of it."""

    __tablename__ = "deleted_attempts"
    __table_args__ = (Index("ix_deleted_attempts_uncounted", "run_id", postgresql_where=text("NOT is_counted")),)

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
    ended_at: Mapped[datetime]
    is_counted: Mapped[bool] = mapped_column(server_default=text("false"))
    """`Attempt.is_counted`, of an attempt that is here or was imported again."""


class DailyUsage(Base):
    """Usage of a day, in UTC, by all counted attempts with the same device and the same value of one dimension."""

    __tablename__ = "daily_usage"

    dimension: Mapped[str] = mapped_column(primary_key=True)
    """`key`, `experiment`, `model` or `method`: each attempt is counted in all of them."""
    day: Mapped[date] = mapped_column(primary_key=True)
    value: Mapped[str] = mapped_column(primary_key=True)
    """Id or name; empty: none."""
    device: Mapped[str] = mapped_column(primary_key=True)
    """As in attempts; empty: unknown."""
    device_seconds: Mapped[float]
    tokens: Mapped[float]


def select_attempts() -> Select[*tuple[Any, ...]]:
    """Select the attempts of the runs that exist, with the columns of `DeletedAttempt`; live ones last until now."""
    # A worker of another version, or an archive, may have numbers whose sum has no place in a float.
    reported = cast(AttemptTimings.timings["tokens"].astext, Float)
    tokens = func.least(func.coalesce(reported, 0.0), _MOST_TOKENS, type_=Float)
    query = select(
        Attempt.run_id, Attempt.attempt, Run.created_by, Run.experiment_id, Run.method, Run.base_model, Attempt.device,
        Run.devices_needed.label("devices"), tokens.label("tokens"), Attempt.started_at,
        func.coalesce(Attempt.ended_at, func.now()).label("ended_at"), Attempt.is_counted,
    )  # fmt: skip
    timed = and_(AttemptTimings.run_id == Attempt.run_id, AttemptTimings.attempt == Attempt.attempt)
    return query.join(Run, Run.id == Attempt.run_id).outerjoin(AttemptTimings, timed)


def count_attempts(table: type[Attempt | DeletedAttempt], limit: int) -> Select[int]:
    """Add attempts that have ended to the daily usage, at most `limit`, and select how many there were.

    Those that others are changing are counted the next time. Only one transaction may do this at a time.
    """
    rows: Any = table.__table__
    ended = select(rows.c.run_id, rows.c.attempt).where(~rows.c.is_counted, rows.c.ended_at.is_not(None))
    batch = ended.limit(limit).with_for_update(skip_locked=True).cte("batch")
    counted = (
        update(rows)
        .where(rows.c.run_id == batch.c.run_id, rows.c.attempt == batch.c.attempt)
        .values(is_counted=True)
        .returning(rows.c.run_id, rows.c.attempt)
        .cte("counted")
    )
    attempts: Select[*tuple[Any, ...]] = select_attempts() if table is Attempt else select(rows)
    attempts = attempts.join(counted, and_(rows.c.run_id == counted.c.run_id, rows.c.attempt == counted.c.attempt))
    daily: Any = DailyUsage.__table__
    usage = insert(daily).from_select([*daily.c.keys()], _divide_among_days(attempts.subquery("used")))
    added = usage.on_conflict_do_update(
        index_elements=[*daily.primary_key],
        set_={
            "device_seconds": daily.c.device_seconds + usage.excluded.device_seconds,
            "tokens": daily.c.tokens + usage.excluded.tokens,
        },
    )
    return select(func.count()).select_from(counted).add_cte(added.returning(daily.c.day).cte("added"))


def all_usage() -> Any:
    """Return a subquery of all usage until now, deleted runs included, with the columns of `DailyUsage`."""
    existing = select_attempts().where(~Attempt.is_counted)
    deleted = select(DeletedAttempt.__table__).where(~DeletedAttempt.is_counted)
    uncounted = _divide_among_days(existing.union_all(deleted).subquery("used"))
    return select(DailyUsage.__table__).union_all(uncounted).subquery("usage")


def _divide_among_days(attempts: Any) -> Select[*tuple[Any, ...]]:
    """Select what attempts used, with the columns of `DailyUsage`; of its tokens, a day has the share of its time."""
    used = attempts.c
    series = func.generate_series(func.date_trunc("day", used.started_at, "UTC"), used.ended_at, _DAY)
    days = series.table_valued(column("start", DateTime(timezone=True))).render_derived(name="days")
    values = {
        "key": used.created_by, "experiment": used.experiment_id, "model": used.base_model, "method": used.method
    }  # fmt: skip
    # PostgreSQL selects rows before it makes a union of them only if the columns have the same type in all parts; a
    # parameter alone is a VARCHAR.
    names = cast(array([literal(name) for name in values]), ARRAY(Text))
    pairs = func.unnest(names, array([*values.values()]))
    properties = pairs.table_valued("dimension", "value").render_derived(name="properties")
    start: Any = days.c.start
    seconds = _seconds(func.least(used.ended_at, start + _DAY) - func.greatest(used.started_at, start))
    share = seconds / _seconds(used.ended_at - used.started_at)
    groups = (
        properties.c.dimension,
        cast(func.timezone("UTC", start), Date).label("day"),
        func.coalesce(properties.c.value, "").label("value"),
        func.coalesce(used.device, "").label("device"),
    )
    device_seconds, tokens = func.sum(used.devices * seconds), func.sum(used.tokens * share)
    query = select(*groups, device_seconds.label("device_seconds"), tokens.label("tokens"))
    # Also those that end before they began, since the clock was set, have used nothing.
    return query.select_from(attempts.join(days, true()).join(properties, true())).where(seconds > 0).group_by(*_GROUPS)


def _seconds(interval: Any) -> Any:
    return cast(extract("epoch", interval), Float)


def count_budgets(key_id: str | None = None) -> Update:
    """Count what the keys with a budget, or this one, have used of it since the beginning of the month."""
    month = cast(func.date_trunc("month", func.timezone("UTC", func.now())), Date)
    keys = select(ApiKey.id).where(ApiKey.max_device_hours.is_not(None), ApiKey.revoked_at.is_(None))
    if key_id is not None:
        keys = keys.where(ApiKey.id == key_id)
    # Those that others are changing are counted the next time: to wait for them could be a deadlock.
    budgeted = keys.with_for_update(skip_locked=True, key_share=True).cte("budgeted")
    usage = all_usage()
    by_key = (
        select(usage.c.value, func.sum(usage.c.device_seconds).label("seconds"))
        .where(usage.c.dimension == "key", usage.c.day >= month, usage.c.value.in_(select(budgeted.c.id)))
        .group_by(usage.c.value)
        .subquery()
    )
    counted = {"budget_month": month, "budget_seconds": by_key.c.seconds}
    is_new = or_(*(getattr(ApiKey, name).is_distinct_from(value) for name, value in counted.items()))
    return update(ApiKey).where(ApiKey.id == by_key.c.value, is_new).values(**counted)
