"""Data sets: validated files of training rows."""

from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.models import Base, Owned


class Dataset(Owned, Base):
    """A validated file of rows in one format; its bytes lie in storage under its id."""

    __tablename__ = "datasets"
    __table_args__ = (
        CheckConstraint("rows > 0", name="has_rows"),
        CheckConstraint("bytes > 0", name="has_bytes"),
        CheckConstraint("octet_length(sha256) = 64", name="sha256_is_hex"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    format: Mapped[str]
    """`chat`, `prompt_completion`, `text`, `preference`, `prompt`."""
    extension: Mapped[str]
    rows: Mapped[int] = mapped_column(BigInteger)
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    columns: Mapped[list[str]]
    preview: Mapped[list[Any]]
    token_statistics: Mapped[dict[str, Any] | None]


class UploadKey(Base):
    """An `Idempotency-Key` that came with an upload, and what became of it."""

    __tablename__ = "upload_keys"

    created_by: Mapped[str] = mapped_column(primary_key=True)
    idempotency_key: Mapped[str] = mapped_column(primary_key=True)
    request_digest: Mapped[str]
    """SHA-256 of the file as it came and of all that was said about it."""
    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id", ondelete="CASCADE"), index=True)
