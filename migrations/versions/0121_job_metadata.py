"""Index of the metadata of fine-tuning jobs, by which they are listed."""

import sqlalchemy as sa

from migrations import online

revision = "0121"
down_revision = "0120"


def upgrade() -> None:
    online.create_index(
        "ix_runs_job_metadata",
        "runs",
        ["job_metadata"],
        postgresql_using="gin",
        postgresql_ops={"job_metadata": "jsonb_path_ops"},
        postgresql_where=sa.text("job_metadata IS NOT NULL"),
    )
