"""Tables of webhooks: the addresses that events are sent to, and the deliveries to them."""

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, Index, Text, func, text
from sqlalchemy.dialects.postgresql import ARRAY, JSON, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from anneal.contracts.field_types import JsonObject
from app.tables.base import Base, Owned


class Webhook(Owned, Base):
    """Address to which events are sent. The secrets that sign them are in `secrets`, as `webhook:<id>`."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    url: Mapped[str]
    format: Mapped[str]
    types: Mapped[list[str]] = mapped_column(ARRAY(Text))
    """Types of the events that are sent."""
    filter: Mapped[JsonObject] = mapped_column(JSONB)
    """Conditions on the event's run, by field of `WebhookFilter`."""
    enabled: Mapped[bool] = mapped_column(server_default=text("true"))
    previous_secret_until: Mapped[datetime | None]
    """End of the time in which the secret before the last rotation signs too."""
    failing_since: Mapped[datetime | None]
    """Time of the first failed attempt since the last one that succeeded."""
    last_error: Mapped[str | None]


class WebhookDelivery(Base):
    """Event that is sent to one webhook. It outlives the run, so `run_id` refers to no row."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        CheckConstraint("status IN ('pending','delivered','failed')", name="status_known"),
        Index("ix_webhook_deliveries_webhook_id_id", "webhook_id", "id"),
        Index(
            "ix_webhook_deliveries_due",
            "webhook_id",
            "next_attempt_at",
            postgresql_where=text("status = 'pending'"),
        ),
        Index(
            "ix_webhook_deliveries_pending",
            "webhook_id",
            "created_at",
            postgresql_where=text("status = 'pending'"),
        ),
        Index("ix_webhook_deliveries_finished_at", "finished_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    webhook_id: Mapped[str]
    """Not a foreign key: those of a deleted webhook are deleted in batches."""
    type: Mapped[str]
    run_id: Mapped[str | None]
    seq: Mapped[int | None] = mapped_column(BigInteger)
    ts: Mapped[datetime]
    """Time of the event."""
    event: Mapped[JsonObject] = mapped_column(JSON)
    """Data of the event. JSON as in `run_events`: JSONB refuses some texts that JSON has."""
    run: Mapped[JsonObject | None] = mapped_column(JSON)
    """State of the run when the feed numbered the event; null for a test."""
    status: Mapped[str] = mapped_column(server_default="pending")
    attempts: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of attempts so far, with one under way."""
    next_attempt_at: Mapped[datetime | None] = mapped_column(server_default=func.now())
    """Earliest time of the next attempt; during an attempt, the time at which it counts as lost; null at the end."""
    response_status: Mapped[int | None]
    error: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    finished_at: Mapped[datetime | None]
