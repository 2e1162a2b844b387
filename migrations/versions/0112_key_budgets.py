"""Budget of device-hours per month of a key, and what its runs have used of it."""

import sqlalchemy as sa
from alembic import op

revision = "0112"
down_revision = "0111"


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("max_device_hours", sa.Float(), nullable=True))
    op.add_column("api_keys", sa.Column("budget_month", sa.Date(), nullable=True))
    op.add_column("api_keys", sa.Column("budget_seconds", sa.Float(), server_default=sa.text("0"), nullable=False))
    op.create_check_constraint(op.f("ck_api_keys_max_device_hours_positive"), "api_keys", "max_device_hours >= 0")
