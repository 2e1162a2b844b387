"""Wire models of API keys."""

from dataclasses import dataclass

from app.contracts.field_types import Moment


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
