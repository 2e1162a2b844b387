"""Graders of fine-tuning jobs that learn from rewards."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0124"
down_revision = "0123"


def upgrade() -> None:
    op.add_column("runs", sa.Column("job_grader", postgresql.JSONB(astext_type=sa.Text()), nullable=True))
