"""A database is lent again only when nothing of the test before is left in it."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.conftest import Services
from tests.databases import SpareDatabases


@pytest.fixture
def databases(services: Services) -> Iterator[SpareDatabases]:
    databases = SpareDatabases(services.create_database, services.drop_database)
    yield databases
    databases.close()


def test_rows_are_removed_and_connections_ended(databases: SpareDatabases) -> None:
    database = databases.borrow()
    left = psycopg.connect(database.url, autocommit=True)
    for _ in range(2):
        left.execute("INSERT INTO experiments (id, name) VALUES ('exp_1', 'left behind')")
        databases.give_back(database)
        again = databases.borrow()
        assert again.url == database.url
        with pytest.raises(psycopg.OperationalError):
            left.execute("SELECT 1")
        left = psycopg.connect(again.url, autocommit=True)
        assert left.execute("SELECT count(*) FROM experiments").fetchone() == (0,)
    left.close()
    databases.give_back(again)


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TABLE more (x int)",
        "ALTER TABLE datasets ADD CONSTRAINT none_today CHECK (rows < 0)",
        "ALTER TABLE runs ALTER COLUMN name TYPE varchar(1000)",
        "ALTER TABLE runs ALTER COLUMN name SET DEFAULT 'x'",
        "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "DROP INDEX ix_runs_parent_run_id",
        "UPDATE alembic_version SET version_num = 'x'",
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET work_mem = 100', current_database()); END $$",
    ],
)
def test_one_with_another_schema_is_not_lent_again(databases: SpareDatabases, change: str) -> None:
    database = databases.borrow()
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(change)
    databases.give_back(database)
    other = databases.borrow()
    assert other.url != database.url
    databases.give_back(other)
