"""Add the column that says if a worker has the quantizer of llama.cpp."""

import sqlalchemy as sa
from alembic import op

revision = "0123"
down_revision = "0122"


def upgrade() -> None:
    op.add_column("workers", sa.Column("gguf_quantizer", sa.Boolean(), server_default="false", nullable=False))
