"""Wire models of API keys: the key itself is in one response only, that to the call which created it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from app.contracts.field_types import Timestamp
from app.contracts.schemas.runs import Label

KeyScope = Literal["read", "write", "admin"]

_VIEW: dict[str, JsonValue] = {
    "id": "key_01k3x9m6q2v8s4t0w7y5z1a3b5", "name": "laptop", "prefix": "anneal_9f2KcQ", "scopes": ["read", "write"],
    "created_at": "2026-01-02T03:04:05.678Z", "expires_at": "2026-04-02T03:04:05.678Z", "last_used_at": None,
    "revoked_at": None,
}  # fmt: skip


class KeyCreate(BaseModel):
    """Request to create an API key."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"name": "laptop", "scopes": ["read", "write"], "expires_days": 90}},
    )

    name: Label = Field(description="Name to identify the key by.")
    scopes: Annotated[list[KeyScope], Field(min_length=1, max_length=3)] = Field(
        default=["read", "write"], description="Permissions; `admin` includes the others."
    )
    expires_days: float | None = Field(
        default=None, ge=0.001, le=36_500, allow_inf_nan=False, description="Days until it expires; null: never."
    )


class KeyView(BaseModel):
    """API key as shown in lists; never the key itself."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"example": _VIEW})

    id: str
    name: str
    prefix: str = Field(description="First characters of the key, to recognize it by.")
    scopes: list[KeyScope]
    created_at: Timestamp
    expires_at: Timestamp | None
    last_used_at: Timestamp | None
    revoked_at: Timestamp | None


class KeyCreated(KeyView):
    """API key that was just created, with the key itself, which cannot be shown again."""

    model_config = ConfigDict(json_schema_extra={"example": {**_VIEW, "key": "anneal_9f2KcQ" + "x" * 37}})

    key: str = Field(description="Value to send as `Authorization: Bearer <key>`; store it now.")
