"""Checkpoints that can be resumed from."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from app.models import Base


class Checkpoint(Base):
    """A saved state whose folder was complete, fsynced and renamed into place before this row was written."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        CheckConstraint("kind IN ('periodic','stop','best','final')", name="kind_known"),
        CheckConstraint("octet_length(manifest_sha256) = 64", name="manifest_is_sha256_hex"),
        Index("ix_checkpoints_run_id_id", "run_id", "id"),
        Index(
            "ix_checkpoints_copies_to_remove",
            "id",
            postgresql_where=text("deleted_at IS NOT NULL AND copy_begun_at IS NOT NULL"),
        ),
        Index(
            "ix_checkpoints_without_copy",
            "id",
            postgresql_where=text("remote_at IS NULL AND deleted_at IS NULL AND bad_reason IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    name: Mapped[str]
    """Folder name below the attempt's folder, `checkpoint-<step>`."""
    step: Mapped[int]
    epoch: Mapped[float]
    kind: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    manifest_sha256: Mapped[str]
    metrics: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    save_seconds: Mapped[float | None]
    """From the end of the step to the folder's being whole on disk."""
    pinned: Mapped[bool] = mapped_column(server_default=text("false"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deleted_at: Mapped[datetime | None]
    """Set before the folder is removed, so that nobody resumes from a folder that is going away."""
    bad_reason: Mapped[str | None]
    """Why it failed verification when somebody wanted to resume from it."""
    copy_begun_at: Mapped[datetime | None]
    """When a worker last went on with a copy at `ANNEAL_CHECKPOINT_URL`; null: nothing of it is there.

    Whoever has noted it last is the one that may go on."""
    remote_at: Mapped[datetime | None]
    """When that copy was whole."""

    @property
    def copies(self) -> list[str]:
        """Where it is: in the storage of the worker that wrote it, and perhaps at `ANNEAL_CHECKPOINT_URL`."""
        return ["local"] if self.remote_at is None else ["local", "remote"]


class CopyRemoval(Base):
    """A run whose row is gone, and whose copies at `ANNEAL_CHECKPOINT_URL` have yet to go: by a worker, the API has no
    way to them."""

    __tablename__ = "copy_removals"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    not_before: Mapped[datetime] = mapped_column(server_default=func.now())
    """When no worker that was sending one of them sends any more."""
