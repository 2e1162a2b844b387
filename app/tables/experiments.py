"""Table of experiments."""

from sqlalchemy import CheckConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base, Owned


class Experiment(Owned, Base):
    """Named group of runs that are compared with each other."""

    __tablename__ = "experiments"
    __table_args__ = (
        CheckConstraint("max_devices >= 0", name="max_devices_positive"),
        Index("ix_experiments_max_devices", "id", postgresql_where=text("max_devices IS NOT NULL")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    description: Mapped[str] = mapped_column(server_default="")
    max_devices: Mapped[int | None]
    """Devices that its runs may use at a time; null: any number."""
    tags: Mapped[list[str]] = mapped_column(server_default=text("'[]'"))
