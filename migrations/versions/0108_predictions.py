"""Runs of the task `predict`."""

from alembic import op

revision = "0108"
down_revision = "0107"

_NAME = "ck_runs_task_known"


def upgrade() -> None:
    op.drop_constraint(op.f(_NAME), "runs", type_="check", if_exists=True)
    # Not validated at once, which would read the whole table under an exclusive lock.
    op.create_check_constraint(
        op.f(_NAME), "runs", "task IN ('train','evaluate','export','predict')", postgresql_not_valid=True
    )
    with op.get_context().autocommit_block():
        op.execute(f"ALTER TABLE runs VALIDATE CONSTRAINT {_NAME}")
