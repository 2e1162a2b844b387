"""Time at which a run was queued, by which a clock that was set back since is noticed."""

import sqlalchemy as sa
from alembic import op

revision = "0104"
down_revision = "0103"


def upgrade() -> None:
    column = sa.Column("queued_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)
    op.add_column("runs", column)
