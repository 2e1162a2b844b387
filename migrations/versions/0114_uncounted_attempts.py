"""Indexes of the attempts that daily usage does not count yet, also those that live."""

import sqlalchemy as sa

from migrations import online

revision = "0114"
down_revision = "0113"


def upgrade() -> None:
    is_uncounted = sa.text("NOT is_counted")
    for table in ("run_attempts", "deleted_attempts"):
        online.create_index(f"ix_{table}_uncounted", table, ["run_id"], postgresql_where=is_uncounted)
