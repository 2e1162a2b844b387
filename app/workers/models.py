"""Workers, and the devices that each of them offers."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Text, func
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from app.models import Base


class Worker(Base):
    """One worker process, from its start to its end."""

    __tablename__ = "workers"
    __table_args__ = (
        CheckConstraint("state IN ('online','draining','offline')", name="state_known"),
        CheckConstraint("launch_mode IN ('zygote','cold')", name="launch_mode_known"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str]
    pid: Mapped[int]
    boot_id: Mapped[str]
    process_started: Mapped[int] = mapped_column(BigInteger)
    """Start of the process in clock ticks since boot: with boot id and pid it names a process for ever."""
    version: Mapped[str]
    state: Mapped[str]
    slots: Mapped[int]
    backends: Mapped[list[str]] = mapped_column(ARRAY(Text))
    launch_mode: Mapped[str]
    launch_reason: Mapped[str] = mapped_column(server_default="")
    """Why training processes start cold, when they do."""
    plugins: Mapped[dict[str, Any] | None]
    """Names of the operator's own that it has installed, by kind; null: its version tells none."""
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    heartbeat_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Device(Base):
    """A GPU, or a share of the CPU, that runs one training process at a time."""

    __tablename__ = "devices"
    __table_args__ = (
        CheckConstraint("kind IN ('cpu','cuda')", name="kind_known"),
        CheckConstraint("(run_id IS NULL) = (run_epoch IS NULL)", name="run_with_epoch"),
    )

    worker_id: Mapped[str] = mapped_column(ForeignKey("workers.id", ondelete="CASCADE"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str]
    """The hardware's own id (GPU UUID): the same device under two workers has one uid."""
    kind: Mapped[str]
    name: Mapped[str]
    memory_mb: Mapped[int | None]
    run_id: Mapped[str | None]
    run_epoch: Mapped[int | None]
