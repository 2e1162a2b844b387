"""Endpoint `/v1/usage`."""

from datetime import date, timedelta
from typing import Annotated

from fastapi import APIRouter, Query

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.runs.usage import UsageBy, UsageRead
from app.api.dependencies import CurrentSettings, Reading
from app.api.errors import invalid
from app.infra.clock import utc_now
from app.usage import service

router = APIRouter(tags=["usage"])

_FIRST_YEAR, _LAST_YEAR = date(2000, 1, 1), date(9000, 1, 1)
Day = Annotated[date | None, Query(ge=_FIRST_YEAR, le=_LAST_YEAR)]


@router.get("/usage")
async def get_usage(
    session: Reading,
    settings: CurrentSettings,
    by: Annotated[UsageBy, Query(description="What usage is grouped by.")] = "month",
    since: Annotated[
        Day, Query(alias="from", description="First day, in UTC; unset: the first one of the month eleven months ago.")
    ] = None,
    until: Annotated[Day, Query(alias="to", description="Day after the last one; unset: until now.")] = None,
) -> UsageRead:
    """Get the device-hours, the tokens and the cost of all runs by key, experiment, month, model or method.

    Each attempt counts for as long as it had its devices: also one that was lost or failed, and those of runs that were
    deleted. The cost is that of the operator's present prices.
    """
    today = utc_now().date()
    since = since or today.replace(year=today.year - (today.month < 12), month=today.month % 12 + 1, day=1)
    until = until or max(today, since) + timedelta(days=1)
    if until <= since:
        message = f"must be after `from`, {since}: it is the day after the last one"
        raise invalid([FieldError(field="to", code="invalid_range", message=message)])
    return await service.read_usage(session, settings, by, since, until)
