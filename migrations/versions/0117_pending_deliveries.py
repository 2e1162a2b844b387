"""Index of the deliveries that wait, by age: the oldest one is a metric."""

import sqlalchemy as sa

from migrations import online

revision = "0117"
down_revision = "0116"


def upgrade() -> None:
    online.create_index(
        "ix_webhook_deliveries_pending",
        "webhook_deliveries",
        ["webhook_id", "created_at"],
        postgresql_where=sa.text("status = 'pending'"),
    )
