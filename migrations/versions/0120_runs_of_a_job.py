"""Index of the runs that have resumed a fine-tuning job."""

import sqlalchemy as sa

from migrations import online

revision = "0120"
down_revision = "0119"


def upgrade() -> None:
    where = sa.text("job_run_id IS NOT NULL")
    online.create_index("ix_runs_job_run_id_id", "runs", ["job_run_id", "id"], postgresql_where=where)
