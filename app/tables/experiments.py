"""Table of experiments."""

from sqlalchemy import text
from sqlalchemy.orm import Mapped, mapped_column

from app.tables.base import Base, Owned


class Experiment(Owned, Base):
    """Named group of runs that are compared with each other."""

    __tablename__ = "experiments"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    description: Mapped[str] = mapped_column(server_default="")
    tags: Mapped[list[str]] = mapped_column(server_default=text("'[]'"))
