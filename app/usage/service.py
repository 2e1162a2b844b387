"""Usage of devices: each attempt counts as long as it had its devices, whatever became of its run."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from typing import Any

from sqlalchemy import DateTime, Float, Select, cast, column, extract, func, select, text, true
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.schemas.estimates import Cost
from anneal.contracts.schemas.runs.usage import Usage, UsageBy, UsageRead, UsageRow
from app.config import Settings
from app.tables.administration.api_keys import ApiKey
from app.tables.experiments import Experiment
from app.tables.usage import CPU, attempts_since

_MOST_ROWS = 1000
_MONTH = text("interval '1 month'")


@dataclass
class _Sums:
    seconds: float = 0.0
    tokens: float = 0.0
    priced_seconds: float = 0.0
    amount: float = 0.0

    def add(self, seconds: float, tokens: float, price: float | None) -> None:
        self.seconds += seconds
        self.tokens += tokens
        if price is not None:
            self.priced_seconds += seconds
            self.amount += seconds / 3600 * price

    def figures(self, currency: str) -> dict[str, Any]:
        cost = Cost(amount=round(self.amount, 4), currency=currency) if self.priced_seconds else None
        return {
            "device_hours": round(self.seconds / 3600, 4),
            "tokens": round(self.tokens),
            "cost": cost,
            "unpriced_device_hours": round((self.seconds - self.priced_seconds) / 3600, 4),
        }


async def read_usage(session: AsyncSession, settings: Settings, by: UsageBy, since: date, until: date) -> UsageRead:
    """Return the usage from the beginning of a day until that of another, in UTC; months in order, else most first."""
    total, groups = _Sums(), defaultdict[str | None, _Sums](_Sums)
    for row in (await session.execute(_usage_query(by, since, until))).all():
        price = None if row.device in (None, CPU) else settings.gpu_price(row.device)
        for sums in (total, groups[row.group]):
            sums.add(row.seconds, row.tokens, price)
    ordered = sorted(groups.items(), key=lambda item: item[0] or "" if by == "month" else -item[1].seconds)
    largest_groups = dict(ordered[:_MOST_ROWS])
    names = await _names(session, by, largest_groups)
    currency = settings.price_currency
    return UsageRead(
        by=by,
        since=since,
        until=until,
        data=[UsageRow(group=it, name=names.get(it), **sums.figures(currency)) for it, sums in largest_groups.items()],
        has_more=len(groups) > len(largest_groups),
        total=Usage(**total.figures(currency)),
    )


def _usage_query(by: UsageBy, since: date, until: date) -> Select[Any]:
    """Select device-seconds and tokens by group and device; an attempt is divided among the months of its time."""
    first, end = (datetime.combine(day, time(), UTC) for day in (since, until))
    used = attempts_since(first)
    series = func.generate_series(func.date_trunc("month", used.c.started_at), used.c.ended_at, _MONTH)
    months = series.table_valued(column("month", DateTime(timezone=True))).render_derived(name="months")
    month: Any = months.c.month
    until_then = func.least(used.c.ended_at, month + _MONTH, end)
    seconds = cast(func.greatest(_seconds(until_then - func.greatest(used.c.started_at, month, first)), 0), Float)
    share = func.coalesce(seconds / func.nullif(_seconds(used.c.ended_at - used.c.started_at), 0), 0)
    groups = {
        "key": used.c.created_by,
        "experiment": used.c.experiment_id,
        "month": func.to_char(month, "YYYY-MM"),
        "model": used.c.base_model,
        "method": used.c.method,
    }
    device_seconds, tokens = func.sum(used.c.devices * seconds), cast(func.sum(used.c.tokens * share), Float)
    query = select(groups[by].label("group"), used.c.device, device_seconds.label("seconds"), tokens.label("tokens"))
    return query.select_from(used.join(months, true())).group_by(text("1"), text("2")).having(func.sum(seconds) > 0)


def _seconds(interval: Any) -> Any:
    return extract("epoch", interval)


async def _names(session: AsyncSession, by: UsageBy, ids: Iterable[str | None]) -> dict[str | None, str]:
    """Return the names of keys or experiments that exist; nothing else has one."""
    table: Any = {"key": ApiKey, "experiment": Experiment}.get(by)
    if table is None:
        return {}
    rows = await session.execute(select(table.id, table.name).where(table.id.in_([it for it in ids if it])))
    return {row.id: row.name for row in rows}
