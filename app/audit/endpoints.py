"""Endpoint `/v1/audit`, for keys with the scope `admin`."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import AwareDatetime

from anneal.contracts.schemas.administration.audit import AuditView
from anneal.contracts.schemas.page import Page
from app.api.authorization import AdminOnly
from app.api.dependencies import Session
from app.api.pagination import PageQuery, fetch_page
from app.audit.log import Filters, select_entries
from app.tables.administration.audit import AuditEntry

router = APIRouter(prefix="/audit", tags=["audit"], dependencies=[AdminOnly])


@router.get("")
async def list_calls(
    session: Session,
    paging: PageQuery,
    key_id: Annotated[str | None, Query(max_length=100, description="Only calls with this key.")] = None,
    resource: Annotated[
        str | None, Query(max_length=200, description="Only calls on the resource with this id or name.")
    ] = None,
    since: Annotated[
        AwareDatetime | None, Query(description="Only calls since this time, which must have a time zone.")
    ] = None,
) -> Page[AuditView]:
    """List calls that made or attempted changes, newest first: caller, action and time, never the request body."""
    rows, has_more = await fetch_page(session, select_entries(Filters(key_id, resource, since)), AuditEntry.id, paging)
    return Page(data=[AuditView.model_validate(row) for row in rows], has_more=has_more)
