"""Secrets: tokens that runs and imports need, kept sealed."""

from datetime import datetime

from sqlalchemy import func
from sqlalchemy.orm import Mapped, mapped_column

from app.models import Base, Owned


class Secret(Owned, Base):
    """A secret under its name; its value only as what `Keyring.seal` made of it."""

    __tablename__ = "secrets"

    name: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str]
    """Which key of the key file opens it."""
    sealed: Mapped[bytes]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())
