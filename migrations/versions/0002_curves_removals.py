"""Roll-ups of metrics, pins, the loss that a run has ended with, and runs that are being removed."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_ENDED = "('completed','failed','cancelled')"


def upgrade() -> None:
    op.create_table(
        "metric_rollups",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("pass", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("first_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.Column("points", sa.BigInteger(), nullable=False),
        sa.Column("series", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "pass", "kind", "level", "number", name=op.f("pk_metric_rollups")),
        postgresql_with={"fillfactor": "80"},
    )
    op.create_table(
        "removals",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_removals")),
    )
    op.add_column("runs", sa.Column("pinned", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("runs", sa.Column("final_loss", sa.Double(), nullable=True))
    # A trigger and not the code that ends runs: replicas of the version before, which know nothing of it, end runs too.
    op.execute(
        f"""
        CREATE FUNCTION runs_final_loss() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            NEW.final_loss := CASE WHEN NEW.status IN {_ENDED} THEN NEW.best_loss END;
            RETURN NEW;
        END $$
        """
    )
    op.execute(
        "CREATE TRIGGER runs_final_loss BEFORE UPDATE OF status ON runs FOR EACH ROW EXECUTE FUNCTION runs_final_loss()"
    )


def downgrade() -> None:
    op.execute("DROP TRIGGER runs_final_loss ON runs")
    op.execute("DROP FUNCTION runs_final_loss")
    op.drop_column("runs", "final_loss")
    op.drop_column("runs", "pinned")
    op.drop_table("removals")
    op.drop_table("metric_rollups")
