"""Middleware that authenticates a request before its body is read: by key, by session or by ticket."""

import asyncio
import ipaddress
import re
from urllib.parse import parse_qs, quote

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.authorization import Caller, _scope_missing, is_for_people, is_public, needed_scope
from app.api.errors import ApiError, as_api_error, problem_response
from app.api.middleware.body_limits import MOST_PARAMETERS
from app.api_keys import cookies
from app.api_keys.failure_limit import FAILURE_INTERVAL_SECONDS, FailureLimit
from app.api_keys.verifier import KeyVerifier, TokenKind
from app.tables.administration.api_keys import ApiKey, Token

WITHOUT_DATABASE = {"/metrics"}
"""Paths that a recently verified key can still access while the database is unavailable, to report the outage."""

_OUTAGE_TIMEOUT_SECONDS = 3.0

KEY = re.compile(r"anneal_[A-Za-z0-9_-]{43}")
_TOKEN = {kind: re.compile(rf"anneal-{kind}_[A-Za-z0-9_-]{{43}}") for kind in ("session", "ticket")}
_STREAM = re.compile(r"/v1/(?:runs/([^/]+)/)?events")
_SAFE = ("GET", "HEAD", "OPTIONS")
_CREATE_KEY = "Create one on the server with `anneal keys create`."


class AuthenticationMiddleware:
    """Middleware that stores the `Caller` in the request state; only `PUBLIC` requests pass without one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and not is_public(scope):
            try:
                scope.setdefault("state", {})["caller"] = await _authenticate_caller(scope)
            except ApiError as error:
                await _refusal_response(scope, error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _refusal_response(scope: Scope, error: ApiError) -> Response:
    if error.status == 401 and is_for_people(scope):
        return RedirectResponse(f"/login?next={quote(scope['path'], safe='')}", status_code=303)
    return problem_response(scope, error)


async def _authenticate_caller(scope: Scope) -> Caller:
    caller = await _caller_of(scope)
    needed = needed_scope(scope["method"], scope["path"])
    if not caller.has_scope(needed):
        raise _scope_missing(caller, needed)
    return caller


async def _caller_of(scope: Scope) -> Caller:
    """Return the caller by the `Authorization` header, or else by a ticket in the URL, or else by the cookie."""
    auth: KeyVerifier = scope["app"].state.auth
    headers = Headers(scope=scope)
    sent = headers.getlist("authorization")
    if sent:
        return await _by_key(auth, scope, sent)
    if (stream := _STREAM.fullmatch(scope["path"])) and scope["method"] == "GET":
        is_short = scope["query_string"].count(b"&") < MOST_PARAMETERS  # what is longer is refused later
        tickets = is_short and parse_qs(scope["query_string"].decode("latin-1")).get("ticket")
        if tickets:
            return await _by_ticket(auth, scope, tickets, stream[1])
    if (token := cookies.session_of(headers)) is not None:
        return await _by_session(auth, scope, headers, token)
    raise _unauthorized_error("missing_key", f"Send your key as `Authorization: Bearer <key>`. {_CREATE_KEY}")


async def _by_key(auth: KeyVerifier, scope: Scope, sent: list[str]) -> Caller:
    kind, _, key = sent[0].partition(" ")
    if not key:  # such as an empty variable in the header
        raise _unauthorized_error("missing_key", f"Send your key as `Authorization: Bearer <key>`. {_CREATE_KEY}")
    caller = None
    # A malformed key never reaches the database. A valid key is accepted even if its address has no attempts left.
    if len(sent) == 1 and kind.lower() == "bearer" and KEY.fullmatch(key):
        caller = auth.cached_caller(key)
        if caller is None and not await is_surely_wrong(auth, scope, ApiKey, key):
            caller = await _verify_key(auth, key, scope["path"])
    if caller is None:
        raise wrong_credentials(auth.failures, scope)
    return caller


async def _by_ticket(auth: KeyVerifier, scope: Scope, tickets: list[str], run_id: str | None) -> Caller:
    caller = await _of_token(auth, scope, "ticket", tickets[0]) if len(tickets) == 1 else None
    if caller is None:
        detail = (
            "This ticket is unknown or expired, or its key is not valid any more; create another one with "
            "POST /v1/stream-tickets."
        )
        raise wrong_credentials(auth.failures, scope, "invalid_ticket", detail)
    if caller.run_id is not None and caller.run_id != run_id:
        raise ApiError(
            403,
            "ticket_of_other_run",
            f"This ticket opens only the events of {caller.run_id}; create one for the streams that you need.",
        )
    return caller


async def _by_session(auth: KeyVerifier, scope: Scope, headers: Headers, token: str) -> Caller:
    caller = await _of_token(auth, scope, "session", token)
    if caller is None:
        detail = "This session has ended; sign in again at /login."
        raise wrong_credentials(auth.failures, scope, "session_ended", detail)
    # The guard of the host compares the origin with this server's own. Browsers send it with every change.
    if scope["method"] not in _SAFE and "origin" not in headers:
        raise ApiError(
            403,
            "origin_required",
            "A change with the cookie of a session needs the header `Origin`, which browsers send; other programs send "
            "an API key.",
        )
    return caller


async def _of_token(auth: KeyVerifier, scope: Scope, kind: TokenKind, token: str) -> Caller | None:
    if not _TOKEN[kind].fullmatch(token):
        return None
    caller = auth.cached_caller(token)
    if caller is None and not await is_surely_wrong(auth, scope, Token, token):
        caller = await auth.verify_token(kind, token)
    return caller


async def is_surely_wrong(auth: KeyVerifier, scope: Scope, table: type[ApiKey | Token], token: str) -> bool:
    """Return True for a wrong value from an address that has no attempts left, without a query for each."""
    if not auth.failures.is_exhausted(_client_address(scope)):
        return False
    try:
        return not await auth.has_valid(table, token)
    except Exception as error:
        if as_api_error(error) is None:
            raise
        return False  # the query that follows says what is wrong with the database


async def _verify_key(auth: KeyVerifier, key: str, path: str) -> Caller | None:
    known = auth.recently_verified(key) if path in WITHOUT_DATABASE else None
    try:
        async with asyncio.timeout(_OUTAGE_TIMEOUT_SECONDS if known else None):
            return await auth.verify_key(key)
    except Exception as error:
        answer = as_api_error(error)
        if known is not None and (answer is not None or isinstance(error, TimeoutError)):
            return known
        if answer is None:
            raise
        raise answer from error


def wrong_credentials(
    failures: FailureLimit,
    scope: Scope,
    code: str = "invalid_key",
    detail: str = "This key is unknown, expired or revoked; that of `anneal up` is valid until its next start. "
    + _CREATE_KEY,
) -> ApiError:
    """Count a failure of the request's address; return the error 401, or 429 if it has had too many."""
    address = _client_address(scope)
    if failures.is_exhausted(address):
        return ApiError(
            429,
            "too_many_failures",
            "Too many wrong keys or sessions were sent from your address; wait a few seconds and use a valid one.",
            headers={"Retry-After": str(int(FAILURE_INTERVAL_SECONDS))},
        )
    failures.count_attempt(address)
    return _unauthorized_error(code, detail)


def _unauthorized_error(code: str, detail: str) -> ApiError:
    return ApiError(401, code, detail, headers={"WWW-Authenticate": 'Bearer realm="anneal"'})


def _client_address(scope: Scope) -> str:
    """Return the address that failures are counted by: an IPv4 address, or the /64 prefix of an IPv6 client."""
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return "unknown"
    if address.version == 6:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
