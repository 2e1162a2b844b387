"""Where else a checkpoint is, and what of it is still to be removed there."""

import sqlalchemy as sa
from alembic import op

from migrations.online import create_index

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("copy_begun_at", sa.DateTime(timezone=True)), if_not_exists=True)
    op.add_column("checkpoints", sa.Column("remote_at", sa.DateTime(timezone=True)), if_not_exists=True)
    op.create_table(
        "copy_removals",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_copy_removals")),
        if_not_exists=True,
    )
    create_index(
        "ix_checkpoints_copies_to_remove",
        "checkpoints",
        ["id"],
        postgresql_where=sa.text("deleted_at IS NOT NULL AND copy_begun_at IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_checkpoints_copies_to_remove", table_name="checkpoints")
    op.drop_table("copy_removals")
    op.drop_column("checkpoints", "remote_at")
    op.drop_column("checkpoints", "copy_begun_at")
