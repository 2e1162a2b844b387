"""Predicted durations of the queue's plan in a column of their own, since most claims do not read them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0106"
down_revision = "0105"


def upgrade() -> None:
    seconds = postgresql.JSONB(astext_type=sa.Text())
    op.add_column("queue_plan", sa.Column("seconds", seconds, server_default="{}", nullable=False))
