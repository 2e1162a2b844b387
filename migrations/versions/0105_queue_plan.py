"""One row with what the last plan of the queue holds, instead of a row for each reservation."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0105"
down_revision = "0104"
BREAKS_OLD_REPLICAS = "no released version reads the tables that it drops"


def upgrade() -> None:
    op.drop_table("reservations")
    op.drop_table("quota_reservations")
    op.create_table(
        "queue_plan",
        sa.Column("id", sa.Integer(), server_default=sa.text("1"), autoincrement=False, nullable=False),
        sa.Column("holds", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_queue_plan_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_queue_plan")),
    )
