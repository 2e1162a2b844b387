"""Runs as parts of fine-tuning jobs."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0119"
down_revision = "0118"


def upgrade() -> None:
    op.add_column("runs", sa.Column("job_run_id", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("job_metadata", postgresql.JSONB(astext_type=sa.Text()), nullable=True))
