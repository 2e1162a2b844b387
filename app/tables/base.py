"""Base classes of the tables; calling `all_models` registers the whole schema."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ARRAY, ColumnElement, DateTime, MetaData, SQLColumnExpression, Text, any_, func, literal
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """Base of all tables: text without length limits, JSONB for documents, timestamps with time zone."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {
        str: Text,
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
        list[str]: JSONB,
    }


class Owned:
    """Creator and creation time, for every table whose rows are created through the API."""

    created_by: Mapped[str | None]
    """Id of the API key; null for rows created by the service."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


def sql_list(values: Sequence[str]) -> str:
    """Format values as `('a','b')`, for constraints and partial indexes."""
    return "(" + ",".join(f"'{value}'" for value in values) + ")"


def equals_any(column: SQLColumnExpression[Any], values: Collection[str]) -> ColumnElement[bool]:
    """Return the condition that a column has one of the values, of which there may be any number.

    They are one parameter. With `in_` each is one, and a statement has at most 65,535.
    """
    return column == any_(literal(list(values), ARRAY(Text)))
