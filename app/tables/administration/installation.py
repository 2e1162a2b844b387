"""Table of this installation."""

from sqlalchemy import CheckConstraint, text
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.orm import Mapped, mapped_column

from app.infra.ids import new_id
from app.tables.base import Base


class Installation(Base):
    """The one installation whose database this is; its object store is marked with the id."""

    __tablename__ = "installation"
    __table_args__ = (CheckConstraint("is_the_one", name="one"),)

    is_the_one: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    """Allows one row only."""
    id: Mapped[str]


def register_installation() -> Insert:
    """Give the installation its id, unless it has one."""
    return insert(Installation).values(id=new_id("ins")).on_conflict_do_nothing()
