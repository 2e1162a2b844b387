"""Audit log of calls that make changes; the entry is written in the same transaction as the change."""

import os
import pwd
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fastapi import Request
from sqlalchemy import Insert, Select, insert, select
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from app.api.errors import request_id, to_printable
from app.api.middleware.request_metrics import route_template
from app.infra.ids import id_at, new_id
from app.tables.administration.audit import AuditEntry

KEPT_DAYS = 365.0
_LONGEST = 200


class AuditedCall:
    """Call that may make changes; `is_written` is true once it is in the audit log."""

    def __init__(self, scope: Scope) -> None:
        self.is_written = False
        self._scope = scope

    def record_change(self, request: Request, response: Response, session: AsyncSession) -> None:
        """Add the record to the transaction of an endpoint, which is about to be committed."""
        usual = getattr(request.scope.get("route"), "status_code", None) or 200
        # The id of a created resource is not in the request's path, but in the Location header of the response.
        self.write_entry(session, response.status_code or usual, created_resource_id(response.headers))

    def write_entry(self, session: AsyncSession, status: int, resource: str | None) -> None:
        """Add the entry to the session's transaction."""
        session.add(AuditEntry(**self.entry_values(status, resource)))

    def entry_values(self, status: int | None, resource: str | None) -> dict[str, Any]:
        """Return the column values of the call's entry."""
        scope = self._scope
        caller = scope["state"]["caller"]
        client = scope.get("client")
        if resource is None:
            resource = next(reversed(scope.get("path_params", {}).values()), None)
        return {
            "id": new_id("aud"),
            "method": to_printable(scope["method"], 20),
            "route": route_template(scope),
            "resource": None if resource is None else to_printable(str(resource), _LONGEST),
            "key_id": caller.key_id,
            "key_name": caller.name,
            "address": client[0] if client else None,
            "request_id": request_id(scope),
            "status": status,
        }


def call_of(scope: Scope) -> AuditedCall | None:
    """Return the audited call of this request; None if it makes no changes."""
    call: AuditedCall | None = scope["state"].get("audited")
    return call


def skip_audit(request: Request) -> None:
    """Exclude a call from the audit log because it made no changes."""
    call = call_of(request.scope)
    if call is not None:
        call.is_written = True
        del request.scope["state"]["audited"]


def created_resource_id(headers: Headers) -> str | None:
    """Return the id of the resource that a call has created, if any."""
    return headers["location"].rpartition("/")[2] if "location" in headers else None


def command_entry(command: str, resource: str) -> Insert:
    """Build the entry of a command that made changes on the server, with the Unix user who ran it."""
    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:  # no such user, as in containers
        user = str(uid)
    row = {"id": new_id("aud"), "method": "CLI", "route": command, "resource": resource, "key_name": user}
    return insert(AuditEntry).values(row)


@dataclass(frozen=True)
class Filters:
    """Filters of the listing; None matches any value."""

    key_id: str | None = None
    resource: str | None = None
    since: datetime | None = None


def select_entries(filters: Filters) -> "Select[AuditEntry]":
    """Select the matching entries, unordered."""
    query = select(AuditEntry)
    if filters.key_id is not None:
        query = query.where(AuditEntry.key_id == filters.key_id)
    if filters.resource is not None:
        query = query.where(AuditEntry.resource == filters.resource)
    if filters.since is not None:
        query = query.where(AuditEntry.id >= id_at("aud", filters.since))
    return query
