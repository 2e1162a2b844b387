"""Indexes for long lists, roll-ups of metrics, pins, and runs that are being removed."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from migrations.online import create_index

revision = "0002"
down_revision = "0001"

_ENDED = "('completed','failed','cancelled')"
_HAS_FINAL_LOSS = {"postgresql_where": sa.text("final_loss IS NOT NULL")}


def upgrade() -> None:
    op.create_table(
        "metric_rollups",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("pass", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("first_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.Column("points", sa.BigInteger(), nullable=False),
        sa.Column("series", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "pass", "kind", "level", "number", name=op.f("pk_metric_rollups")),
        postgresql_with={"fillfactor": "80"},
    )
    op.create_table(
        "removals",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_removals")),
    )
    op.add_column("runs", sa.Column("pinned", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("runs", sa.Column("final_loss", sa.Double(), nullable=True))
    # A trigger and not the code that ends runs: replicas of the version before, which know nothing of it, end runs too.
    op.execute(
        f"""
        CREATE FUNCTION runs_final_loss() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            NEW.final_loss := CASE WHEN NEW.status IN {_ENDED} THEN NEW.best_loss END;
            RETURN NEW;
        END $$
        """
    )
    op.execute(
        "CREATE TRIGGER runs_final_loss BEFORE UPDATE OF status ON runs FOR EACH ROW EXECUTE FUNCTION runs_final_loss()"
    )
    op.execute(f"UPDATE runs SET final_loss = best_loss WHERE status IN {_ENDED} AND best_loss IS NOT NULL")
    create_index("ix_runs_eval_dataset_id", "runs", ["eval_dataset_id"])
    create_index("ix_runs_resume_checkpoint_id", "runs", ["resume_checkpoint_id"])
    create_index("ix_runs_status_id", "runs", ["status", "id"])
    create_index("ix_runs_experiment_id_status_id", "runs", ["experiment_id", "status", "id"])
    create_index("ix_runs_base_model_id", "runs", [sa.text("(config ->> 'base_model')"), "id"])
    create_index("ix_runs_tags", "runs", ["tags"], postgresql_using="gin", postgresql_ops={"tags": "jsonb_path_ops"})
    create_index("ix_runs_final_loss_id", "runs", ["final_loss", "id"], **_HAS_FINAL_LOSS)
    create_index(
        "ix_runs_experiment_id_final_loss_id", "runs", ["experiment_id", "final_loss", "id"], **_HAS_FINAL_LOSS
    )
    create_index("ix_runs_without_final_loss", "runs", ["id"], postgresql_where=sa.text("final_loss IS NULL"))
    create_index(
        "ix_runs_begun",
        "runs",
        ["id"],
        postgresql_where=sa.text(f"attempt > 0 AND status NOT IN {_ENDED}"),
    )


def downgrade() -> None:
    for name in (
        "ix_runs_begun",
        "ix_runs_without_final_loss",
        "ix_runs_experiment_id_final_loss_id",
        "ix_runs_final_loss_id",
        "ix_runs_tags",
        "ix_runs_base_model_id",
        "ix_runs_experiment_id_status_id",
        "ix_runs_status_id",
        "ix_runs_resume_checkpoint_id",
        "ix_runs_eval_dataset_id",
    ):
        op.drop_index(name, table_name="runs")
    op.execute("DROP TRIGGER runs_final_loss ON runs")
    op.execute("DROP FUNCTION runs_final_loss")
    op.drop_column("runs", "final_loss")
    op.drop_column("runs", "pinned")
    op.drop_table("removals")
    op.drop_table("metric_rollups")
