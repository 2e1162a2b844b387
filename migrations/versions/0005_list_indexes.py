"""Indexes for long lists, and the losses of runs that had ended before. Each step can be repeated after a kill."""

import sqlalchemy as sa
from alembic import op

from migrations.online import create_index

revision = "0005"
down_revision = "0004"

_ENDED = "('completed','failed','cancelled')"
_HAS_FINAL_LOSS = {"postgresql_where": sa.text("final_loss IS NOT NULL")}
_SOME = f"""
    UPDATE runs SET final_loss = best_loss WHERE id IN (
        SELECT id FROM runs WHERE status IN {_ENDED} AND best_loss IS NOT NULL AND final_loss IS NULL
        ORDER BY id LIMIT 5000 FOR UPDATE """


def upgrade() -> None:
    # A few thousand rows at a time, each time committed: nobody waits for the whole of it.
    with op.get_context().autocommit_block():
        for which in ("SKIP LOCKED)", ")"):  # at last those too that somebody held at that moment
            while op.get_bind().execute(sa.text(_SOME + which)).rowcount:
                pass
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
