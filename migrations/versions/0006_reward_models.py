"""Which runs learn from reward models of other runs, so that these are kept."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "run_reward_models",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("reward_run_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "reward_run_id", name=op.f("pk_run_reward_models")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_reward_models_run_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["reward_run_id"], ["runs.id"], name=op.f("fk_run_reward_models_reward_run_id")),
        if_not_exists=True,
    )
    op.create_index("ix_run_reward_models_reward_run_id", "run_reward_models", ["reward_run_id"], if_not_exists=True)


def downgrade() -> None:
    op.drop_table("run_reward_models")
