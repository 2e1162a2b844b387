"""Operations on secrets for the API."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from app.api.errors import ApiError, invalid, not_found
from app.config import Settings
from app.secrets import store
from app.secrets.keyring import KeyringError
from app.tables.administration.secrets import Secret

T = TypeVar("T")


async def put_secret(session: AsyncSession, settings: Settings, name: str, value: str, created_by: str) -> Secret:
    """Store a value under a name, replacing an earlier one; raise 422 for an invalid name or value."""
    try:
        store.check_secret(name, value)
    except ValueError as error:
        field = "name" if str(error).startswith("a name") else "value"
        raise invalid([FieldError(field=field, code="invalid", message=str(error))]) from None
    return await put_own_secret(session, settings, name, value, created_by)


async def put_own_secret(
    session: AsyncSession, settings: Settings, name: str, value: str, created_by: str | None
) -> Secret:
    """Store a secret of the service itself, whose name has a `:`, so that no call lists, replaces or deletes it."""
    keyring = await _with_keys(session, lambda connection: store.encryption_keyring(connection, settings))
    statement = store.put_secret(keyring, name, value, created_by)
    secret: Secret = (await session.scalars(statement, execution_options={"populate_existing": True})).one()
    return secret


async def list_all(session: AsyncSession) -> Sequence[Secret]:
    """Return all secrets, sorted by name."""
    return (await session.scalars(store.select_secrets())).all()


async def remove_secret(session: AsyncSession, name: str) -> None:
    """Delete a secret; raise 404 `secret_not_found` if it does not exist."""
    if await session.scalar(store.remove_secret(name)) is None:
        raise not_found("secret", name)


async def find_secret(session: AsyncSession, settings: Settings, name: str) -> str | None:
    """Return the value of a secret for a call from this server to another service; None if it is not set."""
    values = await _with_keys(session, lambda connection: store.read_secrets(connection, settings, [name]))
    return values.get(name)


async def _with_keys(session: AsyncSession, work: Callable[[Connection], T]) -> T:
    connection = await session.connection()
    try:
        return await connection.run_sync(work)
    except KeyringError as error:
        raise ApiError(503, "secrets_unreadable", str(error)) from None
