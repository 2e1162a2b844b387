"""Table of secrets: encrypted tokens for runs and imports."""

from datetime import datetime

from sqlalchemy import func
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base, Owned


class Secret(Owned, Base):
    """Secret; its value is stored only in the encrypted form produced by `Keyring.seal`."""

    __tablename__ = "secrets"

    name: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str]
    """Id of the key in the key file that decrypts it."""
    sealed: Mapped[bytes]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())
