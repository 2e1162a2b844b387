"""Model of the devices of an attempt, and what usage counts of the attempts of deleted runs."""

import sqlalchemy as sa
from alembic import op

revision = "0110"
down_revision = "0109"


def upgrade() -> None:
    op.add_column("run_attempts", sa.Column("device", sa.Text(), nullable=True))
    op.create_table(
        "deleted_attempts",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("experiment_id", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Float(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_deleted_attempts")),
    )
    op.create_index(op.f("ix_deleted_attempts_ended_at"), "deleted_attempts", ["ended_at"])
