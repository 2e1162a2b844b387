"""Where a worker looks for models, as a digest."""

import sqlalchemy as sa
from alembic import op

revision = "0103"
down_revision = "0102"


def upgrade() -> None:
    op.add_column("workers", sa.Column("model_sources", sa.Text(), nullable=True))
