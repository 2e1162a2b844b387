"""Table of API keys."""

from datetime import datetime

from sqlalchemy import CheckConstraint, Text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base, Owned


class ApiKey(Owned, Base):
    """API key: its first characters for identification and the SHA-256 of the whole key; never the key itself."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("octet_length(digest) = 64", name="digest_is_sha256_hex"),
        CheckConstraint("scopes <@ ARRAY['read','write','admin']", name="scopes_known"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    prefix: Mapped[str]
    digest: Mapped[str] = mapped_column(unique=True)
    scopes: Mapped[list[str]] = mapped_column(ARRAY(Text))
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
