"""Wire models of webhooks. A secret is in two responses only: those to its creation and to its rotation."""

from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.config import JsonDict

from anneal.contracts.field_types import JsonObject, Timestamp
from anneal.contracts.run_status import TrainingStatus
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.common import EXPERIMENT_ID, RUN_ID, Label
from anneal.contracts.schemas.short_repr import ShortRepr

WEBHOOK_ID = "whk_01k3x9m6q2v8s4t0w7y5z1a3d2"

JobEventType = Literal["fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled"]
JOB_EVENTS: tuple[JobEventType, ...] = get_args(JobEventType)
"""Types of events of a webhook of the format `openai`, all of them about fine-tuning jobs."""
WebhookEventType = Literal["status", "progress", "end", JobEventType]
WebhookFormat = Literal["standard", "slack", "openai"]
WebhookUrl = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
DeliveryStatus = Literal["pending", "delivered", "failed"]

_FIELDS: JsonDict = {
    "name": "trainings of llama", "url": "https://hooks.example.com/anneal", "format": "standard",
    "types": ["end"], "filter": {"experiment_id": EXPERIMENT_ID, "status": ["failed"]},
}  # fmt: skip
_VIEW: JsonDict = {
    **_FIELDS, "id": WEBHOOK_ID, "enabled": True, "failing_since": None, "last_error": None,
    "previous_secret_until": None, "created_at": "2026-01-02T03:04:05.678Z",
    "created_by": "key_01k3x9m6q2v8s4t0w7y5z1a3b5",
}  # fmt: skip


class WebhookFilter(BaseModel):
    """Conditions on the run of an event; all of them must hold."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": _FIELDS["filter"]})

    experiment_id: Annotated[str, StringConstraints(max_length=100)] | None = None
    tag: Label | None = None
    base_model: Annotated[str, StringConstraints(min_length=1, max_length=300)] | None = None
    task: RunTask | None = None
    status: Annotated[list[TrainingStatus], Field(min_length=1, max_length=7)] | None = Field(
        default=None, description="Statuses of which the event reports one: the new one of `status`, the last of `end`."
    )


_TYPES = Field(
    description="Types of events: `status`, `progress` and `end` as in `GET /v1/events`; of the format `openai` those "
    "of fine-tuning jobs, by default all three.",
    min_length=1,
    max_length=3,
)
_URL = Field(
    description="Public HTTPS address that receives the events, without user and password. Other addresses need a "
    "host that the operator allows (`ANNEAL_WEBHOOK_PRIVATE_HOSTS`)."
)
_FORMAT = Field(
    description="`standard`: the event, signed as Standard Webhooks specify. `slack`: a sentence for an incoming "
    "webhook of Slack or Mattermost. `openai`: the end of a fine-tuning job as OpenAI's clients unwrap it."
)


class WebhookCreate(BaseModel):
    """Request to create a webhook."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": _FIELDS})

    url: Annotated[WebhookUrl, _URL]
    name: Label | None = Field(default=None, description="Name to identify it by; null: the host of its URL.")
    format: Annotated[WebhookFormat, _FORMAT] = "standard"
    types: Annotated[list[WebhookEventType], _TYPES] = ["end"]
    filter: WebhookFilter = WebhookFilter()

    @model_validator(mode="after")
    def _fill_types(self) -> Self:
        if self.format == "openai" and "types" not in self.model_fields_set:
            self.types = [*JOB_EVENTS]
        return self


class WebhookEdit(BaseModel):
    """Changes to a webhook; omitted fields stay unchanged."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"types": ["end", "status"], "filter": {}}})

    url: Annotated[WebhookUrl, _URL] | None = None
    name: Label | None = None
    format: Annotated[WebhookFormat, _FORMAT] | None = None
    types: Annotated[list[WebhookEventType], _TYPES] | None = None
    filter: WebhookFilter | None = Field(default=None, description="Complete filter; replaces the existing one.")
    enabled: bool | None = Field(
        default=None, strict=True, description="If false, new events are not sent to it, and pending deliveries wait."
    )


class WebhookView(ShortRepr):
    """Webhook, without its secret."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"example": _VIEW})

    id: str
    name: str
    url: str = Field(description="Its scheme and host only, if the key has no scope `write`.")
    format: WebhookFormat
    types: list[WebhookEventType]
    filter: JsonObject = Field(description="Conditions on the run of an event; empty: every run.")
    enabled: bool
    failing_since: Timestamp | None = Field(
        description="Time of the first failed attempt since the last one that succeeded; null if that was the last."
    )
    last_error: str | None = Field(description="Reason why the last attempt failed; null if it succeeded.")
    previous_secret_until: Timestamp | None = Field(
        description="End of the time in which the secret before the last rotation signs too."
    )
    created_at: Timestamp
    created_by: str | None


class WebhookCreated(WebhookView):
    """Webhook with its new secret, which cannot be shown again."""

    model_config = ConfigDict(json_schema_extra={"example": {**_VIEW, "secret": "whsec_" + "x" * 43 + "="}})

    secret: str = Field(description="Key that signs the messages; store it now.")


class DeliveryView(ShortRepr):
    """Delivery of one event to a webhook."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "example": {
                "id": "whd_000640b1e2f3a4b5c6d7e8f901", "webhook_id": WEBHOOK_ID, "type": "end", "run_id": RUN_ID,
                "seq": 41, "status": "pending", "attempts": 1, "response_status": 500,
                "error": "hooks.example.com answered with status 500.",
                "next_attempt_at": "2026-01-02T03:04:10.678Z", "created_at": "2026-01-02T03:04:05.678Z",
                "finished_at": None,
            }
        },
    )  # fmt: skip

    id: str = Field(description="ID of the message, the header `webhook-id` of each attempt.")
    webhook_id: str
    type: str = Field(description="Type of the event, or `test`.")
    run_id: str | None
    seq: int | None
    status: DeliveryStatus = Field(description="`pending`: another attempt follows. `failed`: none does.")
    attempts: int = Field(description="Attempts so far, with one under way.")
    response_status: int | None = Field(description="HTTP status of the last response.")
    error: str | None = Field(description="Reason why the last attempt failed.")
    next_attempt_at: Timestamp | None = Field(description="Time of the next attempt; null if none follows.")
    created_at: Timestamp
    finished_at: Timestamp | None
