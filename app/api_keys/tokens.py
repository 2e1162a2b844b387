"""Create, redeem and end the tokens of browsers: sessions, links that create one, and tickets for event streams."""

import secrets
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.authorization import Caller
from app.api_keys.verifier import digest_of, is_valid
from app.tables.administration.api_keys import ApiKey, Token

Kind = Literal["session", "link", "ticket"]
LASTS: dict[Kind, timedelta] = {
    "session": timedelta(days=30),
    "link": timedelta(minutes=10),
    "ticket": timedelta(minutes=10),
}


async def create_token(
    session: AsyncSession, kind: Kind, key_id: str, run_id: str | None = None
) -> tuple[str, datetime]:
    """Create a token that acts for a key; return it and its end. Expired tokens are deleted on the occasion."""
    await session.execute(delete(Token).where(Token.expires_at <= func.now()))
    token = f"anneal-{kind}_{secrets.token_urlsafe(32)}"
    values = {"digest": digest_of(token), "kind": kind, "key_id": key_id, "run_id": run_id}
    new = insert(Token).values(**values, expires_at=func.now() + LASTS[kind])
    ends: datetime = (await session.execute(new.returning(Token.expires_at))).scalar_one()
    return token, ends


async def redeem_link(session: AsyncSession, link: str) -> str | None:
    """Use up a link and return the id of its key; None if it is unknown, expired, or was used before."""
    gone = (
        delete(Token)
        .where(Token.digest == digest_of(link), Token.kind == "link")
        .returning(Token.key_id, Token.expires_at > func.now())
    )
    token = (await session.execute(gone)).one_or_none()
    return token[0] if token is not None and token[1] else None


async def caller_of(session: AsyncSession, key_id: str) -> Caller | None:
    """Return the caller of a key; None if it is not valid any more."""
    row = (
        await session.execute(select(ApiKey.scopes, ApiKey.name).where(ApiKey.id == key_id, is_valid()))
    ).one_or_none()
    return None if row is None else Caller(key_id, frozenset(row[0]), row[1])


async def end_session(session: AsyncSession, token: str) -> None:
    """Delete a session."""
    await session.execute(delete(Token).where(Token.digest == digest_of(token), Token.kind == "session"))
