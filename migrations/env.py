"""Alembic environment: runs the migrations on the connection that `app.tables.migrate` passes in."""

from alembic import context

from app.tables.registry import all_models

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=all_models(),
    compare_type=True,
    compare_server_default=True,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
