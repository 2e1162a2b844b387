"""How fast attempts go: what predicted starts and finishes rest on."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "run_paces",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("likeness", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("timings", JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", name=op.f("pk_run_paces")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_paces_run_id"), ondelete="CASCADE"),
        postgresql_with={"fillfactor": "50"},
        if_not_exists=True,
    )
    op.create_index(
        "ix_run_paces_likeness_run_id", "run_paces", ["likeness", sa.text("run_id DESC")], if_not_exists=True
    )
    # What of the operator's own a worker has installed, by kind; null: a worker of an earlier version, which told none.
    op.add_column("workers", sa.Column("plugins", JSONB(), nullable=True), if_not_exists=True)


def downgrade() -> None:
    op.drop_column("workers", "plugins")
    op.drop_table("run_paces")
