"""The list of calls that changed something."""

from datetime import datetime

from sqlalchemy import Index, func
from sqlalchemy.orm import Mapped, mapped_column

from app.models import Base


class AuditEntry(Base):
    """One call: who, what and when; never what was sent."""

    __tablename__ = "audit_log"
    __table_args__ = (Index(None, "key_id", "id"), Index(None, "resource", "id"))

    id: Mapped[str] = mapped_column(primary_key=True)
    ts: Mapped[datetime] = mapped_column(server_default=func.now())
    method: Mapped[str]
    """As of HTTP; `CLI` for a command on the server."""
    route: Mapped[str]
    """The path as its route states it, or the command."""
    resource: Mapped[str | None]
    """Id or name of what was made or changed."""
    key_id: Mapped[str | None]
    """Null for a command on the server."""
    key_name: Mapped[str]
    """Of the key at that time; of a command, the unix user."""
    address: Mapped[str | None]
    request_id: Mapped[str | None]
    status: Mapped[int | None]
