"""Wire models of webhooks in the OpenAI-compatible API."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from anneal.contracts.schemas.openai.lists import Listed
from anneal.contracts.schemas.runs.common import Body, Label
from anneal.contracts.schemas.webhooks import JOB_EVENTS, WEBHOOK_ID, JobEventType, WebhookUrl

_Types = Annotated[list[JobEventType], Field(min_length=1, max_length=len(JOB_EVENTS))]
_FIELDS: JsonDict = {
    "name": "jobs", "url": "https://hooks.example.com/openai", "event_types": ["fine_tuning.job.succeeded"],
}  # fmt: skip
_ENDPOINT: JsonDict = {
    **_FIELDS, "id": WEBHOOK_ID, "object": "webhook_endpoint", "created_at": 1767323045, "signing_secret_hint": None,
    "updated_at": None,
}  # fmt: skip


class EndpointCreate(Body):
    """Request to create a webhook."""

    model_config = ConfigDict(json_schema_extra={"example": _FIELDS})

    name: Label
    url: WebhookUrl = Field(description="Public HTTPS address, or one on a host that the operator allows.")
    event_types: _Types


class EndpointUpdate(Body):
    """Changes to a webhook; omitted fields stay unchanged."""

    model_config = ConfigDict(json_schema_extra={"example": {"event_types": ["fine_tuning.job.failed"]}})

    name: Label | None = None
    url: WebhookUrl | None = None
    event_types: _Types | None = None


class SecretRotation(Body):
    """Request for another secret."""

    model_config = ConfigDict(json_schema_extra={"example": {"keep_old_secret_active_for_24_hours": True}})

    keep_old_secret_active_for_24_hours: bool = Field(
        default=False, description="Sign messages with the previous secret too, for 24 hours."
    )


class EndpointTest(Body):
    """Request for a message with the event of a job that does not exist."""

    model_config = ConfigDict(json_schema_extra={"example": {"event_type": "fine_tuning.job.succeeded"}})

    event_type: JobEventType


class EndpointObject(Listed):
    """Webhook of the format `openai`."""

    model_config = ConfigDict(json_schema_extra={"example": _ENDPOINT})

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int = Field(description="Unix time in seconds.")
    name: str
    url: str = Field(description="Its scheme and host only, if the key has no scope `write`.")
    event_types: list[str]
    signing_secret_hint: str | None = Field(default=None, description="Always null.")
    updated_at: int | None = Field(default=None, description="Always null.")


class EndpointWithSecret(EndpointObject):
    """Webhook with its new secret, which cannot be shown again."""

    model_config = ConfigDict(json_schema_extra={"example": {**_ENDPOINT, "signing_secret": "whsec_" + "x" * 43 + "="}})

    signing_secret: str = Field(description="Key that signs the messages; store it now.")


class EndpointDeleted(BaseModel):
    """Deleted webhook."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"id": WEBHOOK_ID, "object": "webhook_endpoint.deleted", "deleted": True}}
    )

    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


class EndpointTestResult(BaseModel):
    """Response of a receiver to a test."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "object": "webhook_endpoint.test", "webhook_endpoint_id": WEBHOOK_ID, "success": True,
                "event_type": "fine_tuning.job.succeeded", "status_code": 200,
            }
        }
    )  # fmt: skip

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    success: Literal[True] = Field(default=True, description="The receiver has answered, with any status.")
    status_code: int


class EventTypes(BaseModel):
    """Types of events that webhooks can be sent."""

    model_config = ConfigDict(json_schema_extra={"example": {"object": "list", "data": [*JOB_EVENTS]}})

    object: Literal["list"] = "list"
    data: list[str]
