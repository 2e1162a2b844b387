"""Table of the requests that OpenAI's clients may repeat."""

from datetime import datetime

from sqlalchemy import func
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base


class OpenAIRequest(Base):
    """Newest request of an API key with one content, and the idempotency key that its retries share with it."""

    __tablename__ = "openai_requests"

    created_by: Mapped[str] = mapped_column(primary_key=True)
    """Id of the API key."""
    digest: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 of the call and of its content."""
    idempotency_key: Mapped[str]
    arrived_at: Mapped[datetime] = mapped_column(server_default=func.now())
    answered_at: Mapped[datetime | None]
    """Time at which the newest response was sent; None: there was none yet, or it was an error."""
