"""Verifies API keys against the database, with a short-lived cache."""

import asyncio
import hashlib
import hmac
import time
from collections import OrderedDict
from datetime import timedelta
from typing import Literal, TypeVar

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from app.api.authorization import Caller
from app.api.errors import as_api_error
from app.api_keys.failure_limit import FailureLimit
from app.tables.administration.api_keys import ApiKey, Token

T = TypeVar("T")
TokenKind = Literal["session", "ticket"]

CACHE_SECONDS = 10.0

OUTAGE_SECONDS = 900.0
"""Seconds after its last verification for which a key can access `WITHOUT_DATABASE` during an outage."""

_MAX_CACHED_KEYS = 1000

_DIGESTS_SECONDS = 1.0


class KeyVerifier:
    """Verifies keys against the database and caches the result for ten seconds."""

    def __init__(self, sessions: async_sessionmaker[AsyncSession]) -> None:
        self._sessions = sessions
        self._callers: OrderedDict[str, tuple[Caller, float]] = OrderedDict()
        self._recently_verified: OrderedDict[str, tuple[Caller, float]] = OrderedDict()
        self._validity: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        self._digests: dict[type[ApiKey | Token], tuple[frozenset[str], float]] = {}
        """Digests of all valid keys, or of all tokens, and the monotonic time until which they need no reload."""
        self._digests_turn = asyncio.Lock()
        self.failures = FailureLimit()

    async def has_valid(self, table: type[ApiKey | Token], token: str) -> bool:
        """Return True if a valid key, or a session or ticket, has this value.

        Unlike `verify_key`, any number of calls costs one query a second: for addresses that have sent many wrong
        values. A value that was created less than a second ago may be unknown.
        """
        digest = digest_of(token)
        async with self._digests_turn:
            digests, until = self._digests.get(table, (frozenset[str](), 0.0))
            if digest not in digests and time.monotonic() >= until:
                condition = is_valid() if table is ApiKey else Token.expires_at > func.now()
                async with self._sessions() as session:
                    digests = frozenset(await session.scalars(select(table.digest).where(condition)))
                self._digests[table] = digests, time.monotonic() + _DIGESTS_SECONDS
        return digest in digests

    def cached_caller(self, key: str) -> Caller | None:
        """Return the cached caller of a key that was verified in the last ten seconds."""
        caller, until = self._callers.get(digest_of(key), (None, 0.0))
        return caller if time.monotonic() < until else None

    def recently_verified(self, key: str) -> Caller | None:
        """Return the caller of a key verified within the last `OUTAGE_SECONDS`, for use during an outage."""
        caller, until = self._recently_verified.get(digest_of(key), (None, 0.0))
        return caller if time.monotonic() < until else None

    async def verify_key(self, key: str) -> Caller | None:
        """Return the caller of this key, or None if the key is unknown, expired or revoked."""
        digest = digest_of(key)
        idle = func.coalesce(ApiKey.last_used_at < func.now() - timedelta(minutes=1), True)
        remaining = func.extract("epoch", ApiKey.expires_at - func.now())
        async with self._sessions() as session, session.begin():
            query = select(ApiKey.id, ApiKey.digest, ApiKey.scopes, idle, remaining, ApiKey.name)
            row = (await session.execute(query.where(ApiKey.digest == digest, is_valid()))).one_or_none()
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

    async def verify_token(self, kind: TokenKind, token: str) -> Caller | None:
        """Return the caller for which a session or ticket acts; None if it or its key is not valid any more."""
        digest = digest_of(token)
        ends = func.least(Token.expires_at, ApiKey.expires_at)
        query = (
            select(ApiKey.id, ApiKey.scopes, ApiKey.name, Token.expires_at, Token.run_id)
            .add_columns(func.extract("epoch", ends - func.now()))
            .join(Token, Token.key_id == ApiKey.id)
            .where(Token.digest == digest, Token.kind == kind, Token.expires_at > func.now(), is_valid())
        )
        async with self._sessions() as session:
            row = (await session.execute(query)).one_or_none()
        if row is None:
            self._callers.pop(digest, None)
            return None
        key_id, scopes, name, expires_at, run_id, remaining = row
        caller = Caller(key_id, frozenset(scopes), name, kind, expires_at, run_id)
        _cache_value(self._callers, digest, (caller, time.monotonic() + min(CACHE_SECONDS, float(remaining))))
        return caller

    def forget_session(self, token: str) -> None:
        """Drop what is cached about a session that was ended."""
        self._callers.pop(digest_of(token), None)

    async def still_valid(self, key_id: str) -> bool:
        """Return True if a stream opened with this key may continue; queries the database at most every ten seconds.

        While the database is unavailable the last result applies: a stream has no new events then either.
        """
        verdict, until = self._validity.get(key_id, (True, 0.0))
        if time.monotonic() < until:
            return verdict
        try:
            async with self._sessions() as session:
                valid_id = await session.scalar(select(ApiKey.id).where(ApiKey.id == key_id, is_valid()))
        except Exception as error:
            if as_api_error(error) is None:
                raise
        else:
            verdict = valid_id is not None
        _cache_value(self._validity, key_id, (verdict, time.monotonic() + CACHE_SECONDS))
        return verdict


def _cache_value(cache: OrderedDict[str, T], name: str, value: T) -> None:
    cache[name] = value
    cache.move_to_end(name)
    while len(cache) > _MAX_CACHED_KEYS:
        cache.popitem(last=False)


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key or token, which is stored and looked up in its place."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def is_valid() -> ColumnElement[bool]:
    """Return the condition of keys that are neither revoked nor expired."""
    return and_(ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()))
