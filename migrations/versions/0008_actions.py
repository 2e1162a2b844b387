"""Actions on runs that train, how a run is to stop, and how long each checkpoint took."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0008"
down_revision = "0007"

_ENDED = "('completed','failed','cancelled')"


def upgrade() -> None:
    op.create_table(
        "run_actions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("parameters", JSONB(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("status", sa.Text(), server_default="waiting", nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("result", JSONB(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("request_digest", sa.Text(), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run_actions")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_actions_run_id"), ondelete="CASCADE"),
        sa.CheckConstraint(
            "action IN ('checkpoint','evaluate','sample','set_learning_rate','extend')",
            name=op.f("ck_run_actions_action_known"),
        ),
        sa.CheckConstraint("status IN ('waiting','done','refused','failed')", name=op.f("ck_run_actions_status_known")),
        sa.CheckConstraint(
            "(status = 'waiting') = (finished_at IS NULL)", name=op.f("ck_run_actions_finished_iff_not_waiting")
        ),
        sa.CheckConstraint("status <> 'done' OR step IS NOT NULL", name=op.f("ck_run_actions_done_at_a_step")),
        if_not_exists=True,
    )
    op.create_index("ix_run_actions_run_id_id", "run_actions", ["run_id", "id"], if_not_exists=True)
    op.create_index(
        "ix_run_actions_waiting",
        "run_actions",
        ["run_id"],
        postgresql_where=sa.text("status = 'waiting'"),
        if_not_exists=True,
    )
    op.add_column("runs", sa.Column("stop_mode", sa.Text(), nullable=True), if_not_exists=True)
    op.add_column("checkpoints", sa.Column("save_seconds", sa.Double(), nullable=True), if_not_exists=True)
    # A trigger and not the statement that ends runs: each query of a trigger sees what is committed by then, so that an
    # action that was accepted while the end waited for its lock is found too; and old replicas end runs as well.
    op.execute(
        """
        CREATE OR REPLACE FUNCTION runs_refuse_actions() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            UPDATE run_actions SET status = 'refused', finished_at = clock_timestamp(),
                message = 'The run is ' || NEW.status || ': it ended before this could be done.'
            WHERE run_id = NEW.id AND status = 'waiting';
            RETURN NULL;
        END $$
        """
    )
    op.execute(
        f"""
        CREATE OR REPLACE TRIGGER runs_refuse_actions AFTER UPDATE OF status ON runs FOR EACH ROW
        WHEN (NEW.status IN {_ENDED} AND OLD.status IS DISTINCT FROM NEW.status)
        EXECUTE FUNCTION runs_refuse_actions()
        """
    )


def downgrade() -> None:
    op.execute("DROP TRIGGER runs_refuse_actions ON runs")
    op.execute("DROP FUNCTION runs_refuse_actions")
    op.drop_column("checkpoints", "save_seconds")
    op.drop_column("runs", "stop_mode")
    op.drop_table("run_actions")
