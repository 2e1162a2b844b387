"""Operations of migrations on tables that are in use."""

from typing import Any

from alembic import op
from sqlalchemy import text


def create_index(name: str, table: str, columns: list[Any], *, unique: bool = False, **options: Any) -> None:
    """Build an index without blocking writes; an incomplete index of an earlier try is removed first."""
    with op.get_context().autocommit_block():
        connection = op.get_bind()
        # The build waits for every running transaction, but no transaction waits for it.
        patience = connection.scalar(text("SHOW lock_timeout"))
        connection.execute(text("SET lock_timeout = 0"))
        torn = text("SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(:name) AND NOT indisvalid")
        if connection.scalar(torn, {"name": name}):
            op.drop_index(name, postgresql_concurrently=True)
        op.create_index(
            name, table, columns, unique=unique, if_not_exists=True, postgresql_concurrently=True, **options
        )
        connection.execute(text("SELECT set_config('lock_timeout', :patience, false)"), {"patience": patience})
