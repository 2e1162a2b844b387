"""How attempts ended, for post-mortems, and what was repaired after them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Without a default: no row is written anew.
    op.add_column("run_attempts", sa.Column("report", postgresql.JSONB(), nullable=True), if_not_exists=True)


def downgrade() -> None:
    op.drop_column("run_attempts", "report")
