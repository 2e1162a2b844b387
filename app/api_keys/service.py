"""Create, list, edit and revoke API keys: in the API with an `AsyncSession`, on the server with the database's URL."""

import secrets
from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from anneal.contracts.field_types import changed_fields
from anneal.contracts.schemas.administration.api_keys import KeyCreate, KeyEdit, KeyView
from app.api.authorization import SCOPES
from app.api.errors import conflict, not_found
from app.api.pagination import Paging, fetch_page
from app.api_keys.verifier import digest_of, is_valid
from app.audit.log import command_entry
from app.config import Settings
from app.infra.db import sync_engine
from app.infra.ids import new_id
from app.tables.administration.api_keys import ApiKey
from app.tables.usage import count_budgets

_PREFIX_LENGTH = len("anneal_") + 6


async def create_key(session: AsyncSession, body: KeyCreate, created_by: str) -> tuple[ApiKey, str]:
    """Create a key; return its row and the key itself, which cannot be retrieved again."""
    key, stored = _new_value()
    lasts = None if body.expires_days is None else timedelta(days=body.expires_days)
    row = _key_row(body.name, sorted(set(body.scopes)), stored, lasts)
    row.created_by = created_by
    row.max_devices, row.max_device_hours = body.max_devices, body.max_device_hours
    session.add(row)
    await session.flush()
    await session.refresh(row)
    return row, key


async def list_keys(session: AsyncSession, paging: Paging) -> tuple[list[ApiKey], bool]:
    """Return a page of keys, newest first, including revoked and expired ones."""
    return await fetch_page(session, select(ApiKey), ApiKey.id, paging)


async def get_key(session: AsyncSession, key_id: str) -> ApiKey:
    """Return a key; raise 404 `key_not_found` if it does not exist."""
    row = await session.get(ApiKey, key_id)
    if row is None:
        raise not_found("key", key_id)
    return row


async def edit_key(session: AsyncSession, key_id: str, body: KeyEdit) -> ApiKey:
    """Change the name, quota or budget of a key; omitted fields stay unchanged. Raises 404 `key_not_found`."""
    row = await get_key(session, key_id)
    for name, value in changed_fields(body).items():
        setattr(row, name, value)
    await session.flush()
    if "max_device_hours" in body.model_fields_set:  # what was used before counts from now on
        await session.execute(count_budgets(key_id))
    return row


async def revoke_key(session: AsyncSession, key_id: str) -> None:
    """Revoke a key: within 30 seconds it is rejected everywhere and its streams are closed.

    A key that is revoked already stays so. Raises 404 `key_not_found`, and 409 `last_admin_key` if no other valid key
    has the scope `admin`, since nothing over HTTP could create one then.
    """
    # All calls that revoke a key lock these rows in the same order, so two of them cannot revoke the last two.
    valid = select(ApiKey.id).where(is_valid(), ApiKey.scopes.contains(["admin"])).order_by(ApiKey.id)
    admins = (await session.scalars(valid.with_for_update())).all()
    row = await get_key(session, key_id)
    if list(admins) == [key_id]:
        raise conflict(
            "last_admin_key",
            f"{key_id} is the last valid key with the scope `admin`, so it is not revoked: create another one first, "
            "and revoke this one with that.",
        )
    if row.revoked_at is None:
        row.revoked_at = func.now()


def create_key_sync(
    settings: Settings,
    name: str,
    scopes: Iterable[str],
    expires_in: timedelta | None = None,
    max_devices: int | None = None,
    max_device_hours: float | None = None,
) -> str:
    """Create a key and return it: it cannot be retrieved again. Raises `ValueError` for unknown scopes."""
    sorted_scopes = sorted(set(scopes))
    if not sorted_scopes or not set(sorted_scopes) <= set(SCOPES):
        raise ValueError(f"scopes must be one or more of {', '.join(SCOPES)}, not {', '.join(sorted_scopes) or 'none'}")
    key, stored = _new_value()
    row = _key_row(name, sorted_scopes, stored, expires_in)
    row.max_devices, row.max_device_hours = max_devices, max_device_hours
    with _sync_session(settings) as session, session.begin():
        session.add(row)
        session.execute(command_entry("keys create", row.id))
    return key


def renew_admin_key_sync(settings: Settings, key_id: str, name: str) -> tuple[str, str]:
    """Give the key `key_id` a new value, or create one with scope `admin` if there is no such key or it was revoked.

    Returns:
        The id of the key and its value; the previous value is valid no more.
    """
    key, stored = _new_value()
    valid = update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None)).values(**stored)
    with _sync_session(settings) as session, session.begin():
        renewed_id = session.scalar(valid.returning(ApiKey.id))
        if renewed_id is None:
            renewed_id = new_id("key")
            session.add(ApiKey(id=renewed_id, name=name, **stored, scopes=["admin"]))
        session.execute(command_entry("keys create", renewed_id))
    return renewed_id, key


def list_keys_sync(settings: Settings) -> list[KeyView]:
    """Return all keys, newest first, including revoked and expired ones."""
    with _sync_session(settings) as session:
        rows = session.scalars(select(ApiKey).order_by(ApiKey.id.desc())).all()
        return [KeyView.model_validate(row) for row in rows]


def edit_key_sync(settings: Settings, key_id: str, body: KeyEdit) -> KeyView | None:
    """Change the name, quota or budget of a key; return None if it does not exist."""
    with _sync_session(settings) as session, session.begin():
        row = session.get(ApiKey, key_id)
        if row is None:
            return None
        for name, value in changed_fields(body).items():
            setattr(row, name, value)
        session.flush()
        if "max_device_hours" in body.model_fields_set:
            session.execute(count_budgets(key_id))
        session.execute(command_entry("keys edit", key_id))
        return KeyView.model_validate(row)


def revoke_key_sync(settings: Settings, key_id: str) -> bool:
    """Revoke a key; return False if it does not exist.

    Within 30 seconds the key is rejected everywhere and its streams are closed.
    """
    revoked = update(ApiKey).where(ApiKey.id == key_id).returning(ApiKey.id)
    with _sync_session(settings) as session, session.begin():
        at = func.coalesce(ApiKey.revoked_at, func.now())
        is_revoked = session.scalar(revoked.values(revoked_at=at)) is not None
        if is_revoked:
            session.execute(command_entry("keys revoke", key_id))
        return is_revoked


def _key_row(name: str, scopes: list[str], stored: dict[str, str], expires_in: timedelta | None) -> ApiKey:
    expires_at = None if expires_in is None else func.now() + expires_in
    return ApiKey(id=new_id("key"), name=name, **stored, scopes=scopes, expires_at=expires_at)


def _new_value() -> tuple[str, dict[str, str]]:
    """Return a new key, and what is stored of it."""
    key = "anneal_" + secrets.token_urlsafe(32)
    return key, {"prefix": key[:_PREFIX_LENGTH], "digest": digest_of(key)}


def _sync_session(settings: Settings) -> Session:
    if settings.database_url is None:
        raise ValueError("no database URL: start `anneal up` first or set ANNEAL_DATABASE_URL")
    return Session(sync_engine(settings.database_url, pool_size=0, name="anneal-keys"))
