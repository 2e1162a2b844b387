"""Audit middleware: records calls that no transaction has recorded because they were refused or failed."""

import logging

from sqlalchemy import insert
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import as_api_error
from app.api.rate_limit import RateLimit
from app.audit.log import AuditedCall, created_resource_id
from app.tables.administration.audit import AuditEntry

log = logging.getLogger(__name__)

_BURST = 100
_SECONDS_EACH = 1.0

_SAFE = {"GET", "HEAD", "OPTIONS"}
CHANGES_NOTHING = {
    ("POST", "/v1/runs/validate"),
    ("POST", "/openai/v1/chat/completions"),  # the creation of a serving run is recorded
    ("POST", "/openai/v1/completions"),
    ("POST", "/openai/v1/fine_tuning/alpha/graders/validate"),
    ("POST", "/openai/v1/fine_tuning/alpha/graders/run"),
}


class AuditMiddleware:
    """Middleware after authentication; records every call with an unsafe method in the audit log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._changed_nothing = RateLimit(_BURST, _SECONDS_EACH)
        self._left_out: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] in _SAFE
            or "caller" not in scope["state"]
            or (scope["method"], scope["path"]) in CHANGES_NOTHING
        ):
            await self.app(scope, receive, send)
            return
        call = scope["state"]["audited"] = AuditedCall(scope)
        status: int | None = None
        resource: str | None = None

        async def observed(message: Message) -> None:
            nonlocal status, resource
            if message["type"] == "http.response.start":
                status, resource = message["status"], created_resource_id(Headers(raw=message["headers"]))
            await send(message)

        try:
            await self.app(scope, receive, observed)
        finally:
            if not call.is_written:
                await self._write_if_few(scope, call.entry_values(status, resource))

    async def _write_if_few(self, scope: Scope, row: dict[str, object]) -> None:
        """Write the entry of a call that changed nothing: of each key a burst, then one a second.

        Otherwise a key that may change nothing could fill the database with refused calls.
        """
        key_id = str(row["key_id"])
        if self._changed_nothing.is_exhausted(key_id):
            self._left_out[key_id] = self._left_out.get(key_id, 0) + 1
            return
        self._changed_nothing.count_attempt(key_id)
        if left_out := self._left_out.pop(key_id, 0):
            log.warning("key %s: %d calls that changed nothing are not in the audit log: too many", key_id, left_out)
        await self._write_entry(scope, row)

    async def _write_entry(self, scope: Scope, row: dict[str, object]) -> None:
        """Write the entry, or log it if the database fails; the response is sent already and nothing was changed."""
        try:
            async with scope["app"].state.sessions() as session, session.begin():
                await session.execute(insert(AuditEntry).values(row))
        except Exception as error:
            if as_api_error(error) is None:
                log.exception("cannot write an entry to the audit log")
            fields = " ".join(f"{name}={value}" for name, value in row.items())
            log.warning("not in the audit log: %s", fields)
