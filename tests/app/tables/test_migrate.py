"""Promises about the schema: models and migrations agree, and replicas may migrate at the same time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import CheckConstraint, text

from app.config import Settings
from app.infra.db import sync_engine
from app.infra.errors import SetupError
from app.tables import migrate
from app.tables.registry import all_models
from tests.conftest import Services


@pytest.fixture
def empty(services: Services, settings: Settings) -> Iterator[Settings]:
    """Settings on a database without any table."""
    url = services.create_database(template="template0")
    yield settings.model_copy(update={"database_url": url})
    services.drop_database(url)


def _tables(settings: Settings) -> set[str]:
    query = text("SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace")
    with sync_engine(settings.database_url or "", pool_size=0).connect() as connection:
        return set(connection.scalars(query))


def test_models_and_migrations_describe_the_same_schema(settings: Settings) -> None:
    def counts(item: Any, name: str | None, kind: str, reflected: bool, other: Any) -> bool:
        # Partitions come and go with the months; the table that they belong to is what the models describe.
        return not (kind == "table" and (name or "").startswith("run_events_"))

    with sync_engine(settings.database_url or "", pool_size=0).connect() as connection:
        options = {"compare_type": True, "compare_server_default": True, "include_object": counts}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, all_models()) == []


def test_constraints_of_the_models_are_in_the_database(settings: Settings) -> None:
    """Autogenerate does not look at CHECK constraints, so they are compared by name and table."""
    expected = {
        (table.name, str(constraint.name))
        for table in all_models().tables.values()
        for constraint in table.constraints
        if isinstance(constraint, CheckConstraint)
    }
    query = text(
        "SELECT conrelid::regclass::text, conname FROM pg_constraint WHERE contype = 'c' AND conislocal"
        " AND connamespace = 'public'::regnamespace"
    )
    with sync_engine(settings.database_url or "", pool_size=0).connect() as connection:
        actual = {(table, name) for table, name in connection.execute(query)}
    assert len(expected) > 20
    assert {(table, _full(table, name)) for table, name in expected} == actual


def _full(table: str, name: str) -> str:
    return name if name.startswith("ck_") else f"ck_{table}_{name}"


def test_migrating_twice_changes_nothing(empty: Settings) -> None:
    assert migrate.upgrade_schema(empty) == ("", migrate.needed_revision())
    tables = _tables(empty)
    assert {"runs", "run_events", "run_events_default", "alembic_version"} <= tables
    assert migrate.upgrade_schema(empty) == (migrate.needed_revision(), migrate.needed_revision())
    assert _tables(empty) == tables


def test_replicas_that_start_at_once_migrate_once(empty: Settings) -> None:
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: migrate.upgrade_schema(empty), range(6)))
    assert sorted(before for before, _ in results) == [""] + [migrate.needed_revision()] * 5
    assert {after for _, after in results} == {migrate.needed_revision()}


def test_a_database_of_a_development_version_is_refused_with_a_sentence(settings: Settings) -> None:
    with sync_engine(settings.database_url or "", pool_size=0).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0012'"))
    with pytest.raises(SetupError, match=r"development version.*use a new ANNEAL_HOME"):
        migrate.upgrade_schema(settings)


def test_a_migration_that_fails_leaves_nothing(empty: Settings) -> None:
    engine = sync_engine(empty.database_url or "", pool_size=0)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE checkpoints (x int)"))
    with pytest.raises(Exception, match="checkpoints"):
        migrate.upgrade_schema(empty)
    assert _tables(empty) == {"checkpoints"}


def test_migrate_without_a_database_reports_a_sentence(empty: Settings) -> None:
    with pytest.raises(ValueError, match="anneal up"):
        migrate.upgrade_schema(empty.model_copy(update={"database_url": None}))
