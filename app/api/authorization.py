"""Callers, scopes and the requests that need no key."""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import Scope

from app.api.errors import ApiError, is_below_openai

SCOPES = ("read", "write", "admin")

_READ = ("GET", "HEAD")
_PAGE = r"/(?:compare|workers|try|new|login|favicon\.ico|runs/[^/]+|(?:experiments|datasets|webhooks)(?:/[^/]+)?)?"
PUBLIC: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = (
    (_READ, re.compile(r"/healthz")),
    # The pages of the dashboard are one file without data; a page for signing in is among them.
    (_READ, re.compile(_PAGE)),
    (_READ, re.compile(r"/assets/.+")),
    (("POST",), re.compile(r"/v1/session")),
)
"""Methods and paths of the requests that need no key."""

FOR_ITSELF = {("DELETE", "/v1/session"), ("POST", "/v1/session/links"), ("POST", "/v1/stream-tickets")}
"""Unsafe requests that need only the scope `read`: they affect nothing but the caller's own sign-in."""


@dataclass(frozen=True)
class Caller:
    """Authenticated caller of a request: the API key's id, scopes and name, and the credential that acts for it."""

    key_id: str
    scopes: frozenset[str]
    name: str
    credential: Literal["key", "session", "ticket"] = "key"
    expires_at: datetime | None = None
    """End of the session or ticket; None for a key."""
    run_id: str | None = None
    """The only run whose events a ticket opens; None: all of them."""

    def has_scope(self, scope: str) -> bool:
        """Return True if the key has this scope; `admin` includes every scope."""
        return scope in self.scopes or "admin" in self.scopes


async def _caller_of_request(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


CurrentCaller = Annotated[Caller, Depends(_caller_of_request)]


async def _needs_admin(caller: CurrentCaller) -> None:
    if not caller.has_scope("admin"):
        raise _scope_missing(caller, "admin")


AdminOnly = Depends(_needs_admin)
"""Dependency for routers whose endpoints require the `admin` scope."""


def is_public(scope: Scope) -> bool:
    """Return True if the request needs no key."""
    return is_public_call(scope["method"], scope["path"])


def is_public_call(method: str, path: str) -> bool:
    """Return True if requests with this method and path need no key."""
    return any(method in methods and pattern.fullmatch(path) for methods, pattern in PUBLIC)


def is_for_people(scope: Scope) -> bool:
    """Return True if a browser opens an address outside the API, where a page says more than a JSON error."""
    if scope["type"] != "http" or scope["method"] not in _READ or scope["path"].startswith(("/v1/", "/assets/")):
        return False
    if is_below_openai(scope["path"]):
        return False
    return "text/html" in Headers(scope=scope).get("accept", "")


def needed_scope(method: str, path: str) -> str:
    """Return the scope that every request with this method and path needs at least."""
    if method in (*_READ, "OPTIONS") or (method, path) in FOR_ITSELF:
        return "read"
    return "write"


def _scope_missing(caller: Caller, needed: str) -> ApiError:
    return ApiError(
        403,
        "scope_missing",
        f"This key has the scopes {', '.join(sorted(caller.scopes))}, but this request requires `{needed}`: "
        f"use a key created with `anneal keys create --scope {needed}`.",
    )
