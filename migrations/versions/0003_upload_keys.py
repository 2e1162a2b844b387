"""Idempotency keys of uploads, in a table of their own: the data sets stay as they are."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "upload_keys",
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("request_digest", sa.Text(), nullable=False),
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_upload_keys_dataset_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("created_by", "idempotency_key", name=op.f("pk_upload_keys")),
    )
    op.create_index(op.f("ix_upload_keys_dataset_id"), "upload_keys", ["dataset_id"], unique=False)


def downgrade() -> None:
    op.drop_table("upload_keys")
