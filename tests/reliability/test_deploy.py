"""A deploy without downtime: the schema changes under replicas that serve and runs that train."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psycopg
import pytest
from sqlalchemy import text

import migrations
from app.config import Settings
from app.infra.errors import SetupError
from app.tables import migrate
from tests import programs
from tests.conftest import Services
from tests.reliability.migration_rules import breaking, reason
from tests.server import ThreadServer
from tests.stack import Follower, Stack, WorkerProcess
from tests.waiting import eventually

VERSIONS = sorted((Path(migrations.__file__).parent / "versions").glob("[0-9]*.py"))
NEWER = ["9001", "9002"]
SOURCES = {
    "9001": """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9001", "{head}"

def upgrade():
    op.add_column("runs", sa.Column("colour", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("weight", sa.Integer(), nullable=False, server_default="1"))
    op.create_table("colours", sa.Column("name", sa.Text(), primary_key=True))
""",
    "9002": """
from migrations import online

revision, down_revision = "9002", "9001"

def upgrade():
    online.create_index("ix_runs_colour", "runs", ["colour"])
""",
}
Newer = Callable[[], None]


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Newer:
    """From its call on, this process is a version with two more migrations than the replicas have."""
    for revision, source in SOURCES.items():
        (tmp_path / f"{revision}_more.py").write_text(source.replace("{head}", migrate.needed_revision()))
    return lambda: monkeypatch.setattr(migrate, "VERSIONS", (*migrate.VERSIONS, tmp_path))


@pytest.fixture
def database(services: Services, settings: Settings) -> Iterator[psycopg.Connection]:
    """A connection to the test's database, in the way of those who want a lock."""
    with psycopg.connect(settings.database_url or "") as connection:
        yield connection


class Traffic:
    """Clients that ask and write all the time; every answer must be a good one."""

    def __init__(self, stack: Stack) -> None:
        self.answers: list[int] = []
        self._stack = stack
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="traffic")

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        body = {"backend": "fake", "dataset_id": self._stack.dataset_id, "config": {"base_model": "x", "method": "sft"}}
        with self._stack.api.client_with(self._stack.api.key) as client:
            while not self._over.is_set():
                for ask in (
                    lambda: client.get("/v1/runs"),
                    lambda: client.get("/readyz"),
                    lambda: client.post("/v1/runs", json={**body, "priority": -5}),
                ):
                    answer: httpx.Response = ask()
                    self.answers.append(answer.status_code)


class TestAMigrationWhileReplicasServe:
    def test_requests_are_answered_streams_go_on_and_the_run_completes(self, stack: Stack, newer: Newer) -> None:
        stack.add_worker()
        run_id = stack.create({"steps": 60, "step_seconds": 0.05, "log_lines_per_step": 2})
        follower = Follower(stack, run_id)
        stack.until_step(run_id, 10)
        before = migrate.needed_revision()
        newer()
        said: list[str] = []
        with stack.engine.connect() as busy, Traffic(stack) as traffic:
            # Somebody reads the runs in a transaction that stays open: an ALTER TABLE cannot get its lock.
            busy.execute(text("SELECT count(*) FROM runs"))
            migrating = threading.Thread(target=lambda: migrate.upgrade_schema(stack.settings, said.append))
            migrating.start()
            eventually(lambda: said, timeout=60, what="the migration says what it waits for")
            answered = len(traffic.answers)
            eventually(lambda: len(traffic.answers) > answered + 6, timeout=60, what="nobody queues behind it")
            busy.rollback()
            migrating.join(60)
            assert not migrating.is_alive()
            answered = len(traffic.answers)
            eventually(lambda: len(traffic.answers) > answered + 6, timeout=60)
        assert "is in use by" in said[0] and "trying again in 1 s" in said[0]
        assert set(traffic.answers) <= {200, 202}
        assert stack.until(run_id, "completed")["attempt"] == 1
        ids = follower.join()
        assert ids == list(range(1, len(ids) + 1))
        with stack.engine.connect() as connection:
            assert migrate.current_revision(connection) == NEWER[-1] > before
            valid = text("SELECT indisvalid FROM pg_index WHERE indexrelid = 'ix_runs_colour'::regclass")
            assert connection.scalar(valid) is True
            assert connection.scalar(text("SELECT count(*) FROM runs WHERE weight = 1")) > 1
        # An old replica and an old worker start on the newer database as on their own; `anneal migrate` leaves it.
        stack.add_worker()
        with ThreadServer(stack.settings.model_copy(update={"home": stack.home / "old"})) as old:
            assert old.client.get("/readyz").status_code == 200
        migrating_old = programs.anneal("migrate", **stack.settings.child_environment())
        assert migrating_old.returncode == 0, migrating_old.stderr
        reported = f"At revision 9002, created by a later version; this version (revision {before}) works with it.\n"
        assert migrating_old.stdout == reported


class TestAnOlderDatabase:
    def test_older_database_is_refused_by_replica_and_worker_with_the_next_step(
        self, settings: Settings, tmp_path: Path
    ) -> None:
        with psycopg.connect(settings.database_url or "", autocommit=True) as connection:
            connection.execute("UPDATE alembic_version SET version_num = '0000'")
        revision = migrate.needed_revision()
        sentence = f"The database is at revision 0000, but this version needs {revision}: run `anneal migrate`."
        worker = WorkerProcess(settings.model_copy(update={"launch": "cold"}), tmp_path / "worker.log")
        api = programs.anneal("api", "--port", "0", **settings.child_environment())
        assert (api.returncode, api.stderr.strip().splitlines()[-1]) == (1, f"anneal: {sentence}")
        assert worker.process.wait(60) == 1
        assert f"anneal: {sentence}" in worker.log.read_text() and "Traceback" not in worker.log.read_text()


class TestLocks:
    def test_who_holds_the_table_for_good_is_named(
        self, settings: Settings, database: psycopg.Connection, newer: Newer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        newer()
        monkeypatch.setattr(migrate, "PATIENCE_SECONDS", 0.0)
        monkeypatch.setattr(migrate, "LOCK_SECONDS", 0.1)
        database.execute("SET application_name = 'a careless report'")
        database.execute("SELECT count(*) FROM runs")
        with pytest.raises(SetupError, match=r"a careless report, process .* run `anneal migrate` again"):
            migrate.upgrade_schema(settings)
        database.rollback()
        assert migrate.upgrade_schema(settings)[1] == NEWER[-1]

    def test_half_an_index_is_made_whole_by_the_next_try(
        self, settings: Settings, database: psycopg.Connection, newer: Newer
    ) -> None:
        newer()
        assert migrate.upgrade_schema(settings)[1] == NEWER[-1]
        database.autocommit = True
        database.execute("UPDATE alembic_version SET version_num = '9001'")
        database.execute("DROP INDEX ix_runs_colour")
        database.execute("INSERT INTO colours VALUES ('red'), ('blue')")
        with pytest.raises(psycopg.errors.UniqueViolation):  # as a build that is cut off, it leaves a torn index
            database.execute("CREATE UNIQUE INDEX CONCURRENTLY ix_runs_colour ON colours ((1))")
        assert migrate.upgrade_schema(settings) == ("9001", NEWER[-1])
        validity = database.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'ix_runs_colour'::regclass")
        assert validity.fetchall() == [(True,)]


class TestRules:
    @pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.stem)
    def test_a_migration_leaves_what_the_version_before_needs_or_says_why_not(self, path: Path) -> None:
        source = path.read_text()
        violations = breaking(source)
        assert not violations or len(reason(source).split()) > 3, (
            f"{path.name}: {violations}; see migrations/__init__.py"
        )

    def test_numbers_of_four_digits_in_a_row_distinguish_newer_from_older(self) -> None:
        assert [path.name[:5] for path in VERSIONS] == [f"{n:04}_" for n in range(100, 100 + len(VERSIONS))]
        assert migrate.needed_revision() == VERSIONS[-1].name[:4]
        assert migrate.schema_error(migrate.needed_revision()) is None and migrate.schema_error("9999") is None
        assert "needs" in (migrate.schema_error("") or "") and "anneal migrate" in (migrate.schema_error("0000") or "")

    @pytest.mark.parametrize(
        "statement",
        [
            'op.drop_column("runs", "name")',
            'op.drop_table("runs")',
            'op.rename_table("runs", "jobs")',
            'op.alter_column("runs", "name", new_column_name="title")',
            'op.alter_column("runs", "name", type_=sa.Integer())',
            'op.alter_column("runs", "name", nullable=False)',
            'op.add_column("runs", sa.Column("colour", sa.Text(), nullable=False))',
            'op.create_index("ix", "runs", ["name"])',
            'op.execute("ALTER TABLE runs DROP COLUMN name")',
            'op.execute(sa.text("ALTER TABLE runs RENAME TO jobs"))',
            'op.execute("ALTER TABLE runs ALTER name SET NOT NULL")',
            'op.execute("ALTER TABLE runs ALTER name TYPE int")',
            'op.execute("ALTER TABLE runs ADD COLUMN colour text NOT NULL")',
            'op.execute("CREATE INDEX ix ON runs (name)")',
        ],
    )
    def test_migration_that_breaks_old_replicas_is_reported(self, statement: str) -> None:
        source = f"def upgrade():\n    {statement}\n"
        assert breaking(source)
        assert not reason(source)
        assert reason(f'BREAKS_OLD_REPLICAS = "no version since 0.3 reads it"\n{source}')

    @pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
    def test_additive_migration_is_not_reported(self, source: str) -> None:
        assert breaking(source) == []
        operations = (
            'op.create_table("t", sa.Column("x", sa.Text(), nullable=False))\n    op.create_index("ix", "t", ["x"])'
        )
        assert breaking(f"def upgrade():\n    {operations}\ndef downgrade():\n    op.drop_table('t')\n") == []


def test_replicas_that_wait_for_their_turn_hold_up_no_index(settings: Settings, newer: Newer) -> None:
    """A replica that waits in a statement for the lock of the migrating one would be waited for by its index."""
    newer()

    async def all_at_once() -> list[tuple[str, str]]:
        return await asyncio.gather(*(asyncio.to_thread(migrate.upgrade_schema, settings) for _ in range(4)))

    results = asyncio.run(asyncio.wait_for(all_at_once(), 120))
    assert {after for _, after in results} == {NEWER[-1]}
    assert sorted(before for before, _ in results)[1:] == [NEWER[-1]] * 3
