"""Usage of devices: each attempt counts as long as it had its devices, whatever became of its run."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import Select, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.schemas.estimates import Cost
from anneal.contracts.schemas.runs.usage import Usage, UsageBy, UsageRead, UsageRow
from app.config import Settings
from app.tables.administration.api_keys import ApiKey
from app.tables.experiments import Experiment
from app.tables.usage import CPU, all_usage

_MOST_ROWS = 1000


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
    rows = (await session.execute(usage_query(by, since, until))).all()
    gpus = {row.device for row in rows} - {"", CPU}
    prices = {gpu: settings.gpu_price(gpu) for gpu in gpus}
    for row in rows:
        for sums in (total, groups[row.group]):
            sums.add(row.seconds, row.tokens, prices.get(row.device))
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


def usage_query(by: UsageBy, since: date, until: date) -> Select[Any]:
    """Select device-seconds and tokens by group and device."""
    usage = all_usage()
    is_month = by == "month"
    group = func.to_char(usage.c.day, "YYYY-MM") if is_month else func.nullif(usage.c.value, "")
    # Each dimension has all usage; that of methods has the fewest rows.
    is_dimension = usage.c.dimension == ("method" if is_month else by)
    sums = (func.sum(usage.c.device_seconds).label("seconds"), func.sum(usage.c.tokens).label("tokens"))
    query = select(group.label("group"), usage.c.device, *sums)
    return query.where(is_dimension, usage.c.day >= since, usage.c.day < until).group_by(text("1"), text("2"))


async def _names(session: AsyncSession, by: UsageBy, ids: Iterable[str | None]) -> dict[str | None, str]:
    """Return the names of keys or experiments that exist; nothing else has one."""
    table: Any = {"key": ApiKey, "experiment": Experiment}.get(by)
    if table is None:
        return {}
    rows = await session.execute(select(table.id, table.name).where(table.id.in_([it for it in ids if it])))
    return {row.id: row.name for row in rows}
