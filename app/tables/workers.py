"""Tables of workers and their devices."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Text, func
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base


class Worker(Base):
    """Worker process, from its start to its end."""

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
    """Start of the process in clock ticks since boot; unique together with boot id and pid."""
    version: Mapped[str]
    state: Mapped[str]
    slots: Mapped[int]
    backends: Mapped[list[str]] = mapped_column(ARRAY(Text))
    labels: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    """Labels that the operator gave it; runs ask for them in `resources.labels`."""
    launch_mode: Mapped[str]
    launch_reason: Mapped[str] = mapped_column(server_default="")
    """Reason for cold starts of training processes; empty otherwise."""
    plugins: Mapped[dict[str, Any] | None]
    """Names of installed plugins, by kind; null if the worker's version does not report them."""
    packages: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    """Installed packages of optimizers, and liger-kernel; null if the worker's version does not report them."""
    model_sources: Mapped[str | None]
    """Digest of where it looks for models (`app.base_models.sources`); null if that is not known."""
    gguf: Mapped[bool] = mapped_column(server_default="false")
    """True if it has the converter of llama.cpp."""
    gguf_quantizer: Mapped[bool] = mapped_column(server_default="false")
    """True if it has the quantizer of llama.cpp, too."""
    group_address: Mapped[str | None]
    """Address at which processes of other hosts reach its training processes; null: it trains no run with others."""
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    heartbeat_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Device(Base):
    """GPU, or share of the CPU, that runs one training process at a time."""

    __tablename__ = "devices"
    __table_args__ = (
        CheckConstraint("kind IN ('cpu','cuda')", name="kind_known"),
        CheckConstraint("(run_id IS NULL) = (lease_epoch IS NULL)", name="run_with_lease_epoch"),
    )

    worker_id: Mapped[str] = mapped_column(ForeignKey("workers.id", ondelete="CASCADE"), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str]
    """Hardware id (GPU UUID); the same device has the same uid under different workers."""
    kind: Mapped[str]
    name: Mapped[str]
    memory_mb: Mapped[int | None]
    run_id: Mapped[str | None]
    lease_epoch: Mapped[int | None]
    trouble: Mapped[str | None]
    """Error of the device, until a run has trained on it again."""
    paused_until: Mapped[datetime | None]
    """Time until which the device takes no run because of that error."""
    telemetry: Mapped[dict[str, Any] | None]
    """Latest sample of the driver, with its time; null for CPUs and without a driver."""
