"""Packages of optimizers that are installed on a worker."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0101"
down_revision = "0100"


def upgrade() -> None:
    op.add_column("workers", sa.Column("packages", postgresql.ARRAY(sa.Text()), nullable=True))
