"""What was estimated of each run when it was created, to be held against what was measured."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "run_estimates",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("estimate", JSONB(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run_estimates")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_estimates_run_id"), ondelete="CASCADE"),
        if_not_exists=True,
    )


def downgrade() -> None:
    op.drop_table("run_estimates")
