"""Deliveries that outlive their webhook: they are deleted in batches, as there may be millions of them."""

from alembic import op

revision = "0116"
down_revision = "0115"


def upgrade() -> None:
    op.drop_constraint(op.f("fk_webhook_deliveries_webhook_id"), "webhook_deliveries", type_="foreignkey")
