"""Usage by day of the attempts that are counted; the dispatcher counts those that are there already, in batches."""

import sqlalchemy as sa
from alembic import op

revision = "0113"
down_revision = "0112"


def upgrade() -> None:
    op.create_table(
        "daily_usage",
        sa.Column("dimension", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("device_seconds", sa.Float(), nullable=False),
        sa.Column("tokens", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("dimension", "day", "value", "device", name=op.f("pk_daily_usage")),
    )
    for table in ("run_attempts", "deleted_attempts"):
        op.add_column(table, sa.Column("is_counted", sa.Boolean(), server_default=sa.text("false"), nullable=False))
        # No query of this version selects attempts by their end.
        op.drop_index(op.f(f"ix_{table}_ended_at"), table)
