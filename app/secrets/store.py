"""Statements on secrets for the API, workers and the command line; independent of FastAPI."""

import re
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Delete, Select, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningDelete, ReturningInsert

from anneal.contracts.schemas.administration.secrets import VALUE
from app.config import Settings
from app.secrets.keyring import Keyring
from app.tables.administration.secrets import Secret

# Names of secrets, not values.
HF_TOKEN = "hf_token"
WANDB_API_KEY = "wandb_api_key"

NAME = r"[a-z][a-z0-9_]{0,62}"
_IS_OWN = Secret.name.contains(":")
"""Condition that a secret is one of the service itself, such as that of a webhook."""

SHOWN = (Secret.name, Secret.key_id, Secret.created_at, Secret.updated_at)


def check_secret(name: str, value: str) -> None:
    """Validate a name and a value; raise ValueError with a message that does not contain the value."""
    if re.fullmatch(NAME, name) is None:
        raise ValueError("a name must be at most 63 lowercase letters, digits and _, and start with a letter")
    if re.fullmatch(VALUE, value) is None:
        raise ValueError("a value must be 8 to 4,096 visible ASCII characters without spaces")


def put_secret(keyring: Keyring, name: str, value: str, created_by: str | None) -> ReturningInsert[Any]:
    """Store a value under a name, replacing an earlier one; return the row."""
    changes = {"key_id": keyring.sealing_id, "sealed": keyring.seal_value(name, value), "updated_at": func.now()}
    statement = insert(Secret).values(name=name, created_by=created_by, **changes)
    return statement.on_conflict_do_update(index_elements=[Secret.name], set_=changes).returning(Secret)


def select_secrets() -> Select[Any]:
    """Select all secrets that users set, sorted by name."""
    return select(Secret).where(~_IS_OWN).order_by(Secret.name)


def remove_secret(name: str) -> ReturningDelete[Any]:
    """Delete a secret that users set; return its name if it existed."""
    return delete(Secret).where(Secret.name == name, ~_IS_OWN).returning(Secret.name)


def remove_own_secret(name: str) -> Delete:
    """Delete a secret of the service itself."""
    return delete(Secret).where(Secret.name == name, _IS_OWN)


def select_sealed(names: Iterable[str]) -> "Select[str, str, bytes]":
    """Select name, key id and encrypted value of the secrets that are set."""
    return select(Secret.name, Secret.key_id, Secret.sealed).where(Secret.name.in_(list(names)))


def read_secrets(connection: Connection, settings: Settings, names: Iterable[str]) -> dict[str, str]:
    """Return the values of the secrets that are set. Raises KeyringError."""
    rows = connection.execute(select_sealed(names)).all()
    if not rows:
        return {}
    keyring = Keyring.from_settings(settings)
    return {name: keyring.open_sealed(name, key_id, box) for name, key_id, box in rows}


def encryption_keyring(connection: Connection, settings: Settings) -> Keyring:
    """Return the keyring for encryption; create a key file only if no secret exists yet. Raises KeyringError."""
    return Keyring.from_settings(settings, make=connection.scalar(select(Secret.name).limit(1)) is None)


def rotate_secrets(connection: Connection, settings: Settings) -> int:
    """Encrypt every secret with the first key of the key file; return the number changed. Raises KeyringError."""
    keyring = Keyring.from_settings(settings)
    rows = connection.execute(select(Secret.name, Secret.key_id, Secret.sealed).with_for_update()).all()
    old = [row for row in rows if row.key_id != keyring.sealing_id]
    for name, key_id, box in old:
        again = keyring.seal_value(name, keyring.open_sealed(name, key_id, box))
        connection.execute(update(Secret).where(Secret.name == name).values(key_id=keyring.sealing_id, sealed=again))
    return len(old)
