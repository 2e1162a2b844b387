"""Tables of checkpoints, and of those of deleted runs to remove from an object store."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base


class Checkpoint(Base):
    """Saved training state; its folder was complete, fsynced and renamed into place before this row was written."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        CheckConstraint("kind IN ('periodic','stop','best','final')", name="kind_known"),
        CheckConstraint("octet_length(manifest_sha256) = 64", name="manifest_is_sha256_hex"),
        Index("ix_checkpoints_run_id_id", "run_id", "id"),
        Index(
            "ix_checkpoints_copies_to_remove",
            "id",
            postgresql_where=text("deleted_at IS NOT NULL AND replica_started_at IS NOT NULL"),
        ),
        Index(
            "ix_checkpoints_without_copy",
            "id",
            postgresql_where=text("replicated_at IS NULL AND deleted_at IS NULL AND bad_reason IS NULL"),
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
    """Seconds from the end of the step until the folder is complete on disk."""
    pinned: Mapped[bool] = mapped_column(server_default=text("false"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deleted_at: Mapped[datetime | None]
    """Set before the folder is removed, so that no run resumes from a folder that is being deleted."""
    bad_reason: Mapped[str | None]
    """Reason why verification failed when a run tried to resume from it."""
    replica_started_at: Mapped[datetime | None]
    """Time of the last claim or renewal of its upload to the object store; null if no files are there.

    Only the worker that set the current value may continue the upload."""
    replicated_at: Mapped[datetime | None]
    """Time at which it was complete in the object store."""

    @property
    def copies(self) -> list[str]:
        """Locations: the storage of the worker that wrote it, and possibly the object store."""
        return ["local"] if self.replicated_at is None else ["local", "remote"]


class ReplicaDeletion(Base):
    """Deleted run whose checkpoints in the object store a worker must still remove: it may have sent one meanwhile."""

    __tablename__ = "replica_deletions"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    not_before: Mapped[datetime] = mapped_column(server_default=func.now())
    """Time after which no worker uploads a checkpoint of the run any more."""
