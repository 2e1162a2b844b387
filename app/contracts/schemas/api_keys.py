"""Wire models of API keys."""

from dataclasses import dataclass

from app.contracts.field_types import Timestamp


@dataclass(frozen=True)
class KeyView:
    """Public attributes of a key; never the key itself."""

    id: str
    name: str
    prefix: str
    scopes: list[str]
    created_at: Timestamp
    expires_at: Timestamp | None
    last_used_at: Timestamp | None
    revoked_at: Timestamp | None
