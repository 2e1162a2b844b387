"""Table of API keys."""

from datetime import date, datetime

from sqlalchemy import CheckConstraint, ForeignKey, Text, func, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base, Owned


class ApiKey(Owned, Base):
    """API key: its first characters for identification and the SHA-256 of the whole key; never the key itself."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("octet_length(digest) = 64", name="digest_is_sha256_hex"),
        CheckConstraint("max_devices >= 0", name="max_devices_positive"),
        CheckConstraint("max_device_hours >= 0", name="max_device_hours_positive"),
        CheckConstraint("scopes <@ ARRAY['read','write','admin']", name="scopes_known"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    prefix: Mapped[str]
    digest: Mapped[str] = mapped_column(unique=True)
    scopes: Mapped[list[str]] = mapped_column(ARRAY(Text))
    max_devices: Mapped[int | None]
    """Devices that the runs of its owner may use at a time; null: any number."""
    max_device_hours: Mapped[float | None]
    """Budget: device-hours of a calendar month, in UTC, after which no further run starts; null: none."""
    budget_month: Mapped[date | None]
    """First day of the month to which `budget_seconds` belongs."""
    budget_seconds: Mapped[float] = mapped_column(server_default=text("0"))
    """Device-seconds that its runs have used in that month, as of the last count (`app.tables.usage.count_budgets`)."""
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Token(Base):
    """Credential of a browser that acts for a key: a session, a link that creates one, or a ticket for streams."""

    __tablename__ = "tokens"
    __table_args__ = (CheckConstraint("octet_length(digest) = 64", name="digest_is_sha256_hex"),)

    digest: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 of the token, which is not stored."""
    kind: Mapped[str]
    """`session`, `link` or `ticket`."""
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id", ondelete="CASCADE"), index=True)
    run_id: Mapped[str | None]
    """The only run whose events a ticket opens; null: all of them."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime] = mapped_column(index=True)
