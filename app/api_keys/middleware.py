"""API keys, and the middleware that verifies one before the request body is read."""

import asyncio
import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.authorization import Caller, _scope_missing, is_public
from app.api.errors import ApiError, as_api_error, problem_response
from app.api_keys.failure_limit import _FAILURE_INTERVAL_SECONDS, FailureLimit
from app.api_keys.verifier import KeyVerifier

WITHOUT_DATABASE = {"/metrics"}
"""Paths that a recently verified key can still access while the database is unavailable, to report the outage."""

_OUTAGE_TIMEOUT_SECONDS = 3.0

_KEY = re.compile(r"anneal_[A-Za-z0-9_-]{43}")


class AuthenticationMiddleware:
    """Middleware that requires a key for every path except `PUBLIC` and stores the `Caller` in the request state."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and not is_public(scope):
            try:
                scope.setdefault("state", {})["caller"] = await _authenticate(scope)
            except ApiError as error:
                await problem_response(scope, error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _authenticate(scope: Scope) -> Caller:
    auth: KeyVerifier = scope["app"].state.auth
    sent = Headers(scope=scope).getlist("authorization")
    if not sent:
        raise _unauthorized("missing_key", "Send your key as `Authorization: Bearer <key>`")
    kind, _, key = sent[0].partition(" ")
    caller = None
    # A malformed key never reaches the database. A valid key is accepted even if its address has no attempts left.
    if len(sent) == 1 and kind.lower() == "bearer":
        caller = auth.remembered(key)
        if caller is None and _KEY.fullmatch(key):
            caller = await _verified(auth, key, scope["path"])
    if caller is None:
        raise _wrong_key(auth.failures, _address(scope))
    needed = "read" if scope["method"] in ("GET", "HEAD", "OPTIONS") else "write"
    if not caller.may(needed):
        raise _scope_missing(caller, needed)
    return caller


async def _verified(auth: KeyVerifier, key: str, path: str) -> Caller | None:
    known = auth.known(key) if path in WITHOUT_DATABASE else None
    try:
        async with asyncio.timeout(_OUTAGE_TIMEOUT_SECONDS if known else None):
            return await auth.verify(key)
    except Exception as error:
        answer = as_api_error(error)
        if known is not None and (answer is not None or isinstance(error, TimeoutError)):
            return known
        if answer is None:
            raise
        raise answer from error


def _wrong_key(failures: FailureLimit, address: str) -> ApiError:
    if failures.exhausted(address):
        return ApiError(
            429,
            "too_many_failures",
            "Too many wrong keys were sent from your address; wait a few seconds and use a valid key.",
            headers={"Retry-After": str(int(_FAILURE_INTERVAL_SECONDS))},
        )
    failures.count(address)
    return _unauthorized("invalid_key", "This key is unknown, expired or revoked")


def _unauthorized(code: str, what: str) -> ApiError:
    detail = f"{what}; create one on the server with `anneal keys create`."
    return ApiError(401, code, detail, headers={"WWW-Authenticate": 'Bearer realm="anneal"'})


def _address(scope: Scope) -> str:
    """Return the address that failures are counted by: an IPv4 address, or the /64 prefix of an IPv6 client."""
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return "unknown"
    if address.version == 6:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
