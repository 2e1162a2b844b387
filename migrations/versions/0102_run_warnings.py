"""Warnings of the validation of a run."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0102"
down_revision = "0101"


def upgrade() -> None:
    op.add_column(
        "runs",
        sa.Column("warnings", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'[]'"), nullable=False),
    )
