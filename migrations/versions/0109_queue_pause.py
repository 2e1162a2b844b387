"""One row while the queue is paused."""

import sqlalchemy as sa
from alembic import op

revision = "0109"
down_revision = "0108"


def upgrade() -> None:
    now = sa.text("clock_timestamp()")
    op.create_table(
        "queue_pause",
        sa.Column("id", sa.Integer(), server_default=sa.text("1"), autoincrement=False, nullable=False),
        sa.Column("paused_at", sa.DateTime(timezone=True), server_default=now, nullable=False),
        sa.Column("paused_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.CheckConstraint("id = 1", name=op.f("ck_queue_pause_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_queue_pause")),
    )
