"""Wire models of API keys and of what browsers use in their place: sessions, sign-in links and stream tickets.

A key itself is in one response only, that to the call which created it.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from anneal.contracts.field_types import DeviceQuota, MonthlyHours, Timestamp
from anneal.contracts.schemas.runs.common import Label

KeyScope = Literal["read", "write", "admin"]

_VIEW: dict[str, JsonValue] = {
    "id": "key_01k3x9m6q2v8s4t0w7y5z1a3b5", "name": "laptop", "prefix": "anneal_9f2KcQ", "scopes": ["read", "write"],
    "max_devices": 4, "max_device_hours": 500.0, "created_at": "2026-01-02T03:04:05.678Z",
    "expires_at": "2026-04-02T03:04:05.678Z", "last_used_at": None, "revoked_at": None,
}  # fmt: skip


class KeyCreate(BaseModel):
    """Request to create an API key."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {"name": "laptop", "scopes": ["read", "write"], "max_devices": 4, "expires_days": 90}
        },
    )

    name: Label = Field(description="Name to identify the key by.")
    scopes: Annotated[list[KeyScope], Field(min_length=1, max_length=3)] = Field(
        default=["read", "write"], description="Permissions; `admin` includes the others."
    )
    max_devices: DeviceQuota | None = Field(
        default=None,
        description="Devices that the runs of the key may use at a time; null: any number. A run that would exceed the "
        "quota waits; with 0 none starts.",
    )
    max_device_hours: MonthlyHours | None = Field(
        default=None,
        description="Budget: device-hours that the runs of the key may use in a calendar month, in UTC; null: any "
        "number. Once they are used, none starts until the next month; runs that train go on.",
    )
    expires_days: float | None = Field(
        default=None, ge=0.001, le=36_500, allow_inf_nan=False, description="Days until it expires; null: never."
    )


class KeyEdit(BaseModel):
    """Changes to an API key; omitted fields stay unchanged."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"name": "laptop of Ada", "max_devices": 8}}
    )

    name: Label | None = None
    max_devices: DeviceQuota | None = Field(
        default=None,
        description="Devices that the runs of the key may use at a time; null removes the quota. Runs that use more "
        "already continue.",
    )
    max_device_hours: MonthlyHours | None = Field(
        default=None,
        description="Device-hours that the runs of the key may use in a calendar month; null removes the budget. What "
        "they have used already counts.",
    )


class KeyView(BaseModel):
    """API key as shown in lists; never the key itself."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"example": _VIEW})

    id: str
    name: str
    prefix: str = Field(description="First characters of the key, to recognize it by.")
    scopes: list[KeyScope]
    max_devices: int | None = Field(description="Devices that its runs may use at a time; null: any number.")
    max_device_hours: float | None = Field(description="Device-hours of its runs in a month; null: any number.")
    created_at: Timestamp
    expires_at: Timestamp | None
    last_used_at: Timestamp | None
    revoked_at: Timestamp | None


class KeyCreated(KeyView):
    """API key that was just created, with the key itself, which cannot be shown again."""

    model_config = ConfigDict(json_schema_extra={"example": {**_VIEW, "key": "anneal_9f2KcQ" + "x" * 37}})

    key: str = Field(description="Value to send as `Authorization: Bearer <key>`; store it now.")


_SESSION: dict[str, JsonValue] = {
    "credential": "session", "key_id": "key_01k3x9m6q2v8s4t0w7y5z1a3d1", "name": "laptop", "scopes": ["read", "write"],
    "expires_at": "2026-02-01T03:04:05.678Z",
}  # fmt: skip


class SessionCreate(BaseModel):
    """Sign-in of a browser: with a key, or with a link."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"example": {"key": "anneal_" + "x" * 43}})

    key: str | None = Field(default=None, max_length=200, description="API key.")
    link: str | None = Field(
        default=None, max_length=200, description="Part behind the `#` of a link of POST /v1/session/links."
    )

    @model_validator(mode="after")
    def _require_one(self) -> "SessionCreate":
        if (self.key is None) == (self.link is None):
            raise ValueError("send either `key` or `link`")
        return self


class SessionRead(BaseModel):
    """Caller of a request, and the session that acts for it."""

    model_config = ConfigDict(json_schema_extra={"example": _SESSION})

    credential: str = Field(description="`session`, or `key` for a caller that sends an API key.")
    key_id: str
    name: str = Field(description="Name of the key.")
    scopes: list[str]
    expires_at: Timestamp | None = Field(description="End of the session; null for a key.")


class LinkRead(BaseModel):
    """Link that signs a browser in, once."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "url": "http://127.0.0.1:8000/login#anneal-link_" + "x" * 43,
                "expires_at": "2026-01-02T03:14:05.678Z",
            }
        }
    )

    url: str = Field(description="Address to open in a browser. What follows `#` is sent to no server and in no log.")
    expires_at: Timestamp


class TicketCreate(BaseModel):
    """Request for a ticket."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"example": {"run_id": None}})

    run_id: str | None = Field(
        default=None, max_length=100, description="The only run whose events the ticket opens; null: all runs."
    )


class TicketRead(BaseModel):
    """Ticket that opens event streams, for pages that cannot send a key."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "ticket": "anneal-ticket_" + "x" * 43, "run_id": None, "expires_at": "2026-01-02T03:14:05.678Z",
            }
        }
    )  # fmt: skip

    ticket: str = Field(description="Value of the parameter `ticket` of GET /v1/runs/{run_id}/events and /v1/events.")
    run_id: str | None
    expires_at: Timestamp = Field(description="Until then it opens streams; an open one goes on.")
