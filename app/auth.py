"""API keys, and the middleware that verifies one before the request body is read."""

import asyncio
import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.audit.log import of_command
from app.auth_models import ApiKey
from app.config import Settings
from app.db import sync_engine
from app.errors import ApiError, as_api_error, problem
from app.ids import new_id
from app.wire import Moment

T = TypeVar("T")

SCOPES = ("read", "write", "admin")
PUBLIC = {"/healthz"}
CACHE_SECONDS = 10.0
WITHOUT_DATABASE = {"/metrics"}
"""Paths that a recently verified key can still access while the database is unavailable, to report the outage."""
OUTAGE_SECONDS = 900.0
"""Seconds after its last verification for which a key can access `WITHOUT_DATABASE` during an outage."""
_OUTAGE_TIMEOUT_SECONDS = 3.0
_MAX_CACHED_KEYS = 1000
_KEY = re.compile(r"anneal_[A-Za-z0-9_-]{43}")
_PREFIX_LENGTH = len("anneal_") + 6
_FAILURE_BURST = 20
_FAILURE_INTERVAL_SECONDS = 3.0
_MAX_ADDRESSES = 10_000


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


class FailureLimit:
    """Rate limit on wrong keys per address: a burst of 20, then one every 3 seconds."""

    def __init__(self) -> None:
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def exhausted(self, address: str) -> bool:
        """Return True if this address has no attempts left for now."""
        return self._level(address) > _FAILURE_BURST - 1

    def count(self, address: str) -> None:
        """Record a wrong key from this address."""
        level = self._level(address) + 1
        self._spent[address] = (level, time.monotonic())
        self._spent.move_to_end(address)
        while len(self._spent) > _MAX_ADDRESSES:
            self._spent.popitem(last=False)

    def _level(self, address: str) -> float:
        level, since = self._spent.get(address, (0.0, 0.0))
        return max(0.0, level - (time.monotonic() - since) / _FAILURE_INTERVAL_SECONDS)


class Auth:
    """Verifies keys against the database and caches the result for ten seconds."""

    def __init__(self, sessions: async_sessionmaker[AsyncSession]) -> None:
        self._sessions = sessions
        self._callers: OrderedDict[str, tuple[Caller, float]] = OrderedDict()
        self._recently_verified: OrderedDict[str, tuple[Caller, float]] = OrderedDict()
        self._validity: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        self.failures = FailureLimit()

    def remembered(self, key: str) -> Caller | None:
        """Return the cached caller of a key that was verified in the last ten seconds."""
        caller, until = self._callers.get(_digest(key), (None, 0.0))
        return caller if time.monotonic() < until else None

    def known(self, key: str) -> Caller | None:
        """Return the caller of a key verified within the last `OUTAGE_SECONDS`, for use during an outage."""
        caller, until = self._recently_verified.get(_digest(key), (None, 0.0))
        return caller if time.monotonic() < until else None

    async def verify(self, key: str) -> Caller | None:
        """Return the caller of this key, or None if the key is unknown, expired or revoked."""
        digest = _digest(key)
        idle = func.coalesce(ApiKey.last_used_at < func.now() - timedelta(minutes=1), True)
        remaining = func.extract("epoch", ApiKey.expires_at - func.now())
        async with self._sessions() as session, session.begin():
            query = select(ApiKey.id, ApiKey.digest, ApiKey.scopes, idle, remaining, ApiKey.name)
            row = (await session.execute(query.where(ApiKey.digest == digest, _valid()))).one_or_none()
            if row is None or not hmac.compare_digest(row[1], digest):
                self._callers.pop(digest, None)
                self._recently_verified.pop(digest, None)
                return None
            if row[3]:
                await session.execute(update(ApiKey).where(ApiKey.id == row[0]).values(last_used_at=func.now()))
        caller = Caller(row[0], frozenset(row[2]), row[5])
        remaining_seconds = float("inf") if row[4] is None else float(row[4])
        now = time.monotonic()
        _cache_value(self._callers, digest, (caller, now + min(CACHE_SECONDS, remaining_seconds)))
        _cache_value(self._recently_verified, digest, (caller, now + min(OUTAGE_SECONDS, remaining_seconds)))
        return caller

    async def still_valid(self, key_id: str) -> bool:
        """Return True if a stream opened with this key may continue; queries the database at most every ten seconds.

        While the database is unavailable the last result applies: a stream has no new events then either.
        """
        verdict, until = self._validity.get(key_id, (True, 0.0))
        if time.monotonic() < until:
            return verdict
        try:
            async with self._sessions() as session:
                found = await session.scalar(select(ApiKey.id).where(ApiKey.id == key_id, _valid()))
        except Exception as error:
            if as_api_error(error) is None:
                raise
        else:
            verdict = found is not None
        _cache_value(self._validity, key_id, (verdict, time.monotonic() + CACHE_SECONDS))
        return verdict


class Authentication:
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
                await problem(scope, error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _authenticate(scope: Scope) -> Caller:
    auth: Auth = scope["app"].state.auth
    sent = Headers(scope=scope).getlist("authorization")
    if not sent:
        raise _unauthorized("missing_key", "Send your key as `Authorization: Bearer <key>`")
    kind, _, key = sent[0].partition(" ")
    caller = auth.remembered(key)
    if caller is None:
        # A malformed key never reaches the database. A valid key is accepted even if its address has no attempts left.
        if len(sent) == 1 and kind.lower() == "bearer" and _KEY.fullmatch(key):
            caller = await _verified(auth, key, scope["path"])
        if caller is None:
            raise _wrong_key(auth.failures, _address(scope))
    needed = "read" if scope["method"] in ("GET", "HEAD", "OPTIONS") else "write"
    if not caller.may(needed):
        raise _scope_missing(caller, needed)
    return caller


def _scope_missing(caller: Caller, needed: str) -> ApiError:
    return ApiError(
        403,
        "scope_missing",
        f"This key has the scopes {', '.join(sorted(caller.scopes))}, but this request requires `{needed}`: "
        f"use a key created with `anneal keys create --scope {needed}`.",
    )


async def _verified(auth: Auth, key: str, path: str) -> Caller | None:
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


def _cache_value(cache: OrderedDict[str, T], name: str, value: T) -> None:
    cache[name] = value
    cache.move_to_end(name)
    while len(cache) > _MAX_CACHED_KEYS:
        cache.popitem(last=False)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def _valid() -> ColumnElement[bool]:
    return and_(ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()))


@dataclass(frozen=True)
class KeyView:
    """Public attributes of a key; never the key itself."""

    id: str
    name: str
    prefix: str
    scopes: list[str]
    created_at: Moment
    expires_at: Moment | None
    last_used_at: Moment | None
    revoked_at: Moment | None


def create_key_sync(settings: Settings, name: str, scopes: Iterable[str], expires_in: timedelta | None = None) -> str:
    """Create a key and return it: it cannot be retrieved again. Raises `ValueError` for unknown scopes."""
    wanted = sorted(set(scopes))
    if not wanted or not set(wanted) <= set(SCOPES):
        raise ValueError(f"scopes must be one or more of {', '.join(SCOPES)}, not {', '.join(wanted) or 'none'}")
    key = "anneal_" + secrets.token_urlsafe(32)
    row = ApiKey(
        id=new_id("key"),
        name=name,
        prefix=key[:_PREFIX_LENGTH],
        digest=_digest(key),
        scopes=wanted,
        expires_at=None if expires_in is None else func.now() + expires_in,
    )
    with _sync_session(settings) as session, session.begin():
        session.add(row)
        session.execute(of_command("keys create", row.id))
    return key


def list_keys_sync(settings: Settings) -> list[KeyView]:
    """Return all keys, newest first, including revoked and expired ones."""
    with _sync_session(settings) as session:
        rows = session.scalars(select(ApiKey).order_by(ApiKey.id.desc())).all()
        names = KeyView.__dataclass_fields__
        return [KeyView(**{name: getattr(row, name) for name in names}) for row in rows]


def revoke_key_sync(settings: Settings, key_id: str) -> bool:
    """Revoke a key; return False if it does not exist.

    Within 30 seconds the key is rejected everywhere and its streams are closed.
    """
    revoked = update(ApiKey).where(ApiKey.id == key_id).returning(ApiKey.id)
    with _sync_session(settings) as session, session.begin():
        at = func.coalesce(ApiKey.revoked_at, func.now())
        found = session.scalar(revoked.values(revoked_at=at)) is not None
        if found:
            session.execute(of_command("keys revoke", key_id))
        return found


def _sync_session(settings: Settings) -> Session:
    if settings.database_url is None:
        raise ValueError("no database URL: start `anneal up` first or set ANNEAL_DATABASE_URL")
    return Session(sync_engine(settings.database_url, pool_size=0, name="anneal-keys"))
