"""Runs of the task `serve`, which have no dataset and come last in the queue."""

from alembic import op

revision = "0115"
down_revision = "0114"

_CONDITIONS = {
    "task_known": "task IN ('train','evaluate','export','predict','serve')",
    "priority_bounded": "priority BETWEEN -1001 AND 1000",
    "dataset_known": "task = 'serve' OR dataset_id IS NOT NULL",
}


def upgrade() -> None:
    for name, condition in _CONDITIONS.items():
        op.drop_constraint(op.f(f"ck_runs_{name}"), "runs", type_="check", if_exists=True)
        # Not validated at once, which would read the whole table under an exclusive lock.
        op.create_check_constraint(op.f(f"ck_runs_{name}"), "runs", condition, postgresql_not_valid=True)
    op.alter_column("runs", "dataset_id", nullable=True)
    with op.get_context().autocommit_block():
        for name in _CONDITIONS:
            op.execute(f"ALTER TABLE runs VALIDATE CONSTRAINT ck_runs_{name}")
