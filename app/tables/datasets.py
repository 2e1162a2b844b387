"""Tables of datasets and of their idempotency keys."""

from typing import Any, NamedTuple

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base, Owned

ORIGINAL_EXTENSION = "original"
"""Extension of an uploaded file that is kept beside the rows."""


class Dataset(Owned, Base):
    """Validated file of training rows in one format; its bytes are in the storage under its id."""

    __tablename__ = "datasets"
    __table_args__ = (
        CheckConstraint("rows > 0", name="has_rows"),
        CheckConstraint("bytes > 0", name="has_bytes"),
        CheckConstraint("octet_length(sha256) = 64", name="sha256_is_hex"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    format: Mapped[str]
    """A `DatasetFormat`."""
    extension: Mapped[str]
    rows: Mapped[int] = mapped_column(BigInteger)
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    columns: Mapped[list[str]]
    preview: Mapped[list[Any]]
    source: Mapped[dict[str, Any]]
    """A `DatasetSource`."""
    token_statistics: Mapped[dict[str, Any] | None]


class DatasetFile(NamedTuple):
    """File of a dataset in the storage."""

    extension: str
    bytes: int
    sha256: str


def files_of(dataset: Any) -> list[DatasetFile]:
    """Return the files of a row of `datasets`: that of its rows, and the uploaded one if it is kept beside it."""
    files = [DatasetFile(dataset.extension, dataset.bytes, dataset.sha256)]
    if (size := dataset.source.get("original_bytes")) is not None:
        files.append(DatasetFile(ORIGINAL_EXTENSION, size, dataset.source["sha256"]))
    return files


class DatasetIdempotencyKey(Base):
    """`Idempotency-Key` of an upload, and the dataset that the upload created."""

    __tablename__ = "dataset_idempotency_keys"

    created_by: Mapped[str] = mapped_column(primary_key=True)
    idempotency_key: Mapped[str] = mapped_column(primary_key=True)
    request_digest: Mapped[str]
    """SHA-256 of the original file and of all fields of the request."""
    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id", ondelete="CASCADE"), index=True)
