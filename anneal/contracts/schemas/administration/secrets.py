"""Wire models of secrets: values are accepted but never returned."""

from pydantic import BaseModel, ConfigDict, Field, JsonValue, SecretStr

from anneal.contracts.field_types import Timestamp

VALUE = r"[\x21-\x7e]{8,4096}"
"""Tokens are visible ASCII; shorter ones could be guessed, and redacting them would redact much of a log."""


class SecretValue(BaseModel):
    """Value of a secret."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"value": "hf_" + "x" * 34}})

    value: SecretStr = Field(
        min_length=8,
        max_length=4096,
        description="Visible ASCII characters without spaces.",
        json_schema_extra={"pattern": f"^{VALUE}$"},
    )


_VIEW: dict[str, JsonValue] = {
    "name": "hf_token",
    "created_at": "2026-01-02T03:04:05.678Z",
    "updated_at": "2026-01-02T03:04:05.678Z",
}


class SecretView(BaseModel):
    """Secret without its value, which cannot be read back."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"example": _VIEW})

    name: str
    created_at: Timestamp
    updated_at: Timestamp


class SecretList(BaseModel):
    """All secrets, sorted by name."""

    model_config = ConfigDict(json_schema_extra={"example": {"data": [_VIEW], "has_more": False}})

    data: list[SecretView]
    has_more: bool = False
