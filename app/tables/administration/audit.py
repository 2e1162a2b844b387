"""Table of the audit log."""

from datetime import datetime

from sqlalchemy import Index, func
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base


class AuditEntry(Base):
    """Call with its caller, action and time; never the request body."""

    __tablename__ = "audit_log"
    __table_args__ = (Index(None, "key_id", "id"), Index(None, "resource", "id"))

    id: Mapped[str] = mapped_column(primary_key=True)
    ts: Mapped[datetime] = mapped_column(server_default=func.now())
    method: Mapped[str]
    """HTTP method; `CLI` for a command on the server."""
    route: Mapped[str]
    """Path template of the route, or the command."""
    resource: Mapped[str | None]
    """Id or name of the created or changed resource."""
    key_id: Mapped[str | None]
    """Null for a command on the server."""
    key_name: Mapped[str]
    """Name of the key at that time; for a command, the Unix user."""
    address: Mapped[str | None]
    request_id: Mapped[str | None]
    status: Mapped[int | None]
