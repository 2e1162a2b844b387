"""Databases that tests use one after another: emptied in between, which costs a fraction of a new one."""

from collections.abc import Callable, Container
from dataclasses import dataclass, field

import psycopg
from psycopg import sql

from app.tables.registry import all_models

_TABLES = """
    SELECT c.relname FROM pg_class c
    WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
      AND c.relname <> 'alembic_version'
"""
# `xmin` is the transaction that wrote a row of the catalog, so it changes with every change of the schema.
_SCHEMA = """
    WITH relations AS (SELECT oid, xmin FROM pg_class WHERE relnamespace = 'public'::regnamespace)
    SELECT md5(string_agg(version, ',' ORDER BY version)) FROM (
        SELECT concat('relation', oid, ' ', xmin) AS version FROM relations
        UNION ALL SELECT concat('column', attrelid, ' ', attnum, ' ', a.xmin)
            FROM pg_attribute a JOIN relations r ON r.oid = attrelid
        UNION ALL SELECT concat('default', d.oid, ' ', d.xmin)
            FROM pg_attrdef d JOIN relations r ON r.oid = adrelid
        UNION ALL SELECT concat('constraint', oid, ' ', xmin)
            FROM pg_constraint WHERE connamespace = 'public'::regnamespace
        UNION ALL SELECT concat('trigger', t.oid, ' ', t.xmin)
            FROM pg_trigger t JOIN relations r ON r.oid = tgrelid
        UNION ALL SELECT concat('function', oid, ' ', xmin) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
        UNION ALL SELECT concat('schema', oid, ' ', xmin) FROM pg_namespace WHERE nspname !~ '^pg_'
        UNION ALL SELECT concat('setting', setrole, ' ', setconfig::text) FROM pg_db_role_setting
            WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
        UNION ALL SELECT concat('migration', version_num) FROM alembic_version
    ) AS versions
"""
_SIZE = "SELECT sum(pg_relation_size(oid)) FROM pg_class WHERE relnamespace = 'public'::regnamespace"
_MAX_GROWTH = 1 << 19  # bytes of files, on which query plans depend
_CHILDREN_FIRST = [table.name for table in reversed(all_models().sorted_tables)]
_OTHERS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND usename = current_user
"""


@dataclass
class Spare:
    """A database between two tests, with the connection that empties it."""

    url: str
    connection: psycopg.Connection
    schema: str
    size: int


@dataclass
class SpareDatabases:
    """Lends databases without a row; `create` makes a migrated one, `drop` removes it."""

    create: Callable[[], str]
    drop: Callable[[str], None]
    _spare: list[Spare] = field(default_factory=list)

    def borrow(self) -> Spare:
        """Return a migrated database without a row."""
        if self._spare:
            return self._spare.pop()
        url = self.create()
        connection = psycopg.connect(url, autocommit=True)
        assert _with_rows(connection) == [], "a migration writes rows: empty no database that should have them"
        return Spare(url, connection, _schema(connection), _size(connection))

    def give_back(self, spare: Spare) -> None:
        """Empty it for the next test; drop it where a test has changed more than rows."""
        if _empty(spare):
            self._spare.append(spare)
        else:
            spare.connection.close()
            self.drop(spare.url)

    def close(self) -> None:
        """Close the connections."""
        for spare in self._spare:
            spare.connection.close()


def _empty(spare: Spare) -> bool:
    connection = spare.connection
    try:
        connection.execute(_OTHERS)
        if _schema(connection) != spare.schema:
            return False
        if full := _with_rows(connection):
            _delete_rows(spare, full)
    except psycopg.Error:  # for instance a test has stopped the server
        return False
    return True


def delete_rows(connection: psycopg.Connection, tables: Container[str] | None = None) -> None:
    """Delete the rows of these tables, or of all but the API keys."""
    if tables is None:
        tables = {*_with_rows(connection)} - {"api_keys"}
    with connection.transaction():
        for table in _CHILDREN_FIRST:
            if table in tables:
                connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table)))


def _delete_rows(spare: Spare, full: list[str]) -> None:
    """Delete the rows of these tables: a deletion costs a fifth of a truncation, but leaves the files as they are."""
    connection = spare.connection
    if _size(connection) > spare.size + _MAX_GROWTH:
        tables = sql.SQL(", ").join(map(sql.Identifier, full))
        connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY CASCADE").format(tables))
        spare.schema = _schema(connection)  # truncation writes to the catalog too
        return
    assert {*full} <= {*_CHILDREN_FIRST}, "a table of no model is not emptied"
    delete_rows(connection, full)


def _schema(connection: psycopg.Connection) -> str:
    row = connection.execute(_SCHEMA).fetchone()
    assert row is not None
    return str(row[0])


def _size(connection: psycopg.Connection) -> int:
    row = connection.execute(_SIZE).fetchone()
    assert row is not None
    return int(row[0])


def _with_rows(connection: psycopg.Connection) -> list[str]:
    """Return the tables that have rows."""
    tables = [str(row[0]) for row in connection.execute(_TABLES)]
    looks = [
        sql.SQL("(SELECT {} FROM {} LIMIT 1)").format(sql.Literal(table), sql.Identifier(table)) for table in tables
    ]
    return [str(row[0]) for row in connection.execute(sql.SQL(" UNION ALL ").join(looks))]
