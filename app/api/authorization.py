"""Callers, scopes and the paths that need no key."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import Scope

from app.api.errors import ApiError

SCOPES = ("read", "write", "admin")

PUBLIC = {"/healthz"}


@dataclass(frozen=True)
class Caller:
    """Authenticated caller of a request: the API key's id, scopes and name."""

    key_id: str
    scopes: frozenset[str]
    name: str

    def may(self, scope: str) -> bool:
        """Return True if the key has this scope; `admin` includes every scope."""
        return scope in self.scopes or "admin" in self.scopes


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


CurrentCaller = Annotated[Caller, Depends(_caller)]


async def _needs_admin(caller: CurrentCaller) -> None:
    if not caller.may("admin"):
        raise _scope_missing(caller, "admin")


AdminOnly = Depends(_needs_admin)
"""Dependency for routers whose endpoints require the `admin` scope."""


def is_public(scope: Scope) -> bool:
    """Return True if the request needs no key."""
    return scope["path"] in PUBLIC and scope["method"] in ("GET", "HEAD")


def _scope_missing(caller: Caller, needed: str) -> ApiError:
    return ApiError(
        403,
        "scope_missing",
        f"This key has the scopes {', '.join(sorted(caller.scopes))}, but this request requires `{needed}`: "
        f"use a key created with `anneal keys create --scope {needed}`.",
    )
