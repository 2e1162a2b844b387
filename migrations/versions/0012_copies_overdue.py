"""Checkpoints that have no copy yet, found by an index, and when the copies of deleted runs may go."""

import sqlalchemy as sa
from alembic import op

from migrations.online import create_index

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column(
        "copy_removals",
        sa.Column("not_before", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        if_not_exists=True,
    )
    create_index(
        "ix_checkpoints_without_copy",
        "checkpoints",
        ["id"],
        postgresql_where=sa.text("remote_at IS NULL AND deleted_at IS NULL AND bad_reason IS NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_checkpoints_without_copy", table_name="checkpoints")
    op.drop_column("copy_removals", "not_before")
