"""Time at which a request of OpenAI's clients was answered."""

import sqlalchemy as sa
from alembic import op

revision = "0122"
down_revision = "0121"


def upgrade() -> None:
    op.add_column("openai_requests", sa.Column("answered_at", sa.DateTime(timezone=True), nullable=True))
