"""Fixtures for all tests: real servers for the session, a separate database for each test."""

import gc
import itertools
import json
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from hypothesis import settings
from psycopg import sql
from sqlalchemy import Engine
from sqlalchemy.engine import make_url
from typer.testing import CliRunner, Result

from app.cli.main import cli
from app.config import Settings
from app.infra.db import sync_engine
from app.infra.home_lock import HomeLock
from app.infra.private_files import write_private_json
from app.standalone.servers import EmbeddedServers
from tests import clusters, programs
from tests.databases import SpareDatabases, delete_rows
from tests.nodes import ROOT
from tests.not_run import NotRun
from tests.properties import SUITE_PROFILE
from tests.scheduling import (
    FIRST,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
    pytest_xdist_setupnodes,
)
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually

__all__ = ["pytest_xdist_auto_num_workers", "pytest_xdist_make_scheduler", "pytest_xdist_setupnodes"]

# Off until the tests are collected: imports create a million objects and hardly any garbage.
gc.disable()

_REDIS_DATABASES = 512

# With pytest-xdist, slow tests start first, so that no process waits for another at the end.
# Tests that mostly wait (for leases, for restarted processes) alternate with tests that mostly compute.
_WAIT = ("e2e", "chaos", "reliability", "web")
_COMPUTE = ("training", "worker", "mutants", "test_fuzz.py")
"""Names of folders and files, those first that take longest in one process."""

settings.load_profile(SUITE_PROFILE)

# A shell without job control starts background jobs with SIGINT ignored, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The threads of several test processes would wait for each other on the same cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests must not depend on the settings of the shell that runs them.
for _name in [name for name in os.environ if name.startswith("ANNEAL_")]:
    del os.environ[_name]
os.environ["ANNEAL_FAKE_BACKEND"] = os.environ["ANNEAL_TRAINER_JOURNAL"] = "true"

# Nor on the hub, which validations of a model that is not on this machine ask.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what this machine cannot run."""
    config.pluginmanager.register(NotRun(), "not-run")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Turn the collector on behind the collection, and keep it off the objects that the imports have created."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest test first, then slow files, alternating those that compute with those that wait."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    files = list(dict.fromkeys(item.path for item in items))
    waits, computes = (
        list(dict.fromkeys(file for name in names for file in files if name in file.parts))
        for names in (_WAIT, _COMPUTE)
    )
    first = [file for file in files if file == ROOT / FIRST]
    turns = [*first, *itertools.chain.from_iterable(itertools.zip_longest(computes, waits))]
    place = {file: number for number, file in reversed([*enumerate(turns)])}
    items.sort(key=lambda item: place.get(item.path, len(files)))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the session that all its processes share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def forked_programs(shared_folder: Path) -> Iterator[None]:
    """Fork the API and worker processes of tests from one that has imported them."""
    with programs.forked(shared_folder / "programs" / "template"):
        yield


@dataclass(frozen=True)
class Services:
    """Servers of a test session; `database_url` is a migrated database that no single test owns."""

    home: Path
    database_url: str
    redis_url: str
    template: str
    redis_databases: "count[int]"

    def admin(self) -> psycopg.Connection:
        """Return a connection that may create and drop databases; the caller closes it."""
        return psycopg.connect(self.database_url, autocommit=True)

    def create_database(self, template: str | None = None) -> str:
        """Create a database from a template (default: the migrated one) and return its URL."""
        name = f"test_{secrets.token_hex(6)}"
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
            sql.Identifier(name), sql.Identifier(template or self.template)
        )
        with self.admin() as connection:
            connection.execute(statement)
        return _with_database(self.database_url, name)

    def drop_database(self, url: str) -> None:
        """Drop a database of `create_database`, even with open connections."""
        name = make_url(url).database or ""
        with self.admin() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def fresh_redis(self) -> str:
        """Return the URL of an empty Redis database. Redis shares publish/subscribe between all databases."""
        number = next(self.redis_databases) % (_REDIS_DATABASES - 1) + 1
        url = self.redis_url.removesuffix("db=0") + f"db={number}"
        with redis.Redis.from_url(url) as client:
            client.flushdb()
        return url


@pytest.fixture(scope="session", autouse=True)
def shared_cluster(shared_folder: Path) -> Iterator[None]:
    """Create one PostgreSQL cluster for all processes of the session."""
    with clusters.shared(shared_folder / "cluster"):
        yield


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Embedded PostgreSQL and Valkey, as in the product but without fsync."""
    home = tmp_path_factory.mktemp("anneal")
    clusters.copy_to(home)
    with HomeLock(home):
        servers = EmbeddedServers(home, durable=False, redis_databases=_REDIS_DATABASES)
        servers.start()
        assert servers.database_url and servers.redis_url
        try:
            yield Services(home, servers.database_url, servers.redis_url, clusters.TEMPLATE, count())
        finally:
            servers.stop()


@pytest.fixture(scope="session")
def databases(services: Services) -> Iterator[SpareDatabases]:
    """Databases for `settings`."""
    databases = SpareDatabases(services.create_database, services.drop_database)
    yield databases
    databases.close()


@pytest.fixture
def settings(services: Services, databases: SpareDatabases, tmp_path: Path) -> Iterator[Settings]:
    """Settings on an empty, migrated database and an empty Redis, with a lease that tests can wait for."""
    database = databases.borrow()
    yield Settings(
        home=tmp_path / "home",
        storage=tmp_path / "storage",
        database_url=database.url,
        redis_url=services.fresh_redis(),
        host="127.0.0.1",
        port=0,
        lease_seconds=3,
    )
    databases.give_back(database)


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    """Engine for the test's database, which its `api` also uses."""
    engine = sync_engine(settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture
def api(settings: Settings) -> Iterator[ApiServer]:
    """The API on a real socket: `.url`, `.key` (scope admin) and `.client` (httpx)."""
    with ThreadServer(settings) as server:
        yield server


@pytest.fixture(scope="module")
def shared_api(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Like `api`, but shared by all tests of a file; for tests that do not affect each other."""
    folder = tmp_path_factory.mktemp("shared")
    url = services.create_database()
    settings = Settings(
        home=folder / "home",
        storage=folder / "storage",
        database_url=url,
        redis_url=services.fresh_redis(),
        host="127.0.0.1",
        port=0,
        lease_seconds=3,
    )
    with ThreadServer(settings) as server:
        yield server
    services.drop_database(url)


def _with_database(url: str, name: str) -> str:
    return make_url(url).set(database=name).render_as_string(hide_password=False)


Anneal = Callable[..., Result]

ROWS = "".join(f'{{"text": "row {n}"}}\n' for n in range(5))
"""A dataset of five rows."""

RUN = """\
dataset_id: {dataset_id}
backend: fake
name: counting
tags: [2026-01-02, no]
config:
  base_model: any
  method: sft
  learning_rate: 1e-4
"""


@pytest.fixture
def anneal(shared_api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Anneal]:
    """Runs a command in an empty folder, with a service to be found by `connection.json`."""
    home = tmp_path / "home"
    home.mkdir()
    write_private_json(home / "connection.json", {"url": shared_api.url, "api_key": shared_api.key, "pids": {}})
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0, **options: Any) -> Result:
        result = CliRunner().invoke(cli, list(arguments), env={"ANNEAL_HOME": str(home)}, **options)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    with HomeLock(home):  # as `anneal up` does
        yield run


@pytest.fixture
def run_file(shared_api: ApiServer, tmp_path: Path) -> Path:
    """A description of a run on a dataset that there is."""
    answer = shared_api.client.post("/v1/datasets", files={"file": ("rows.jsonl", b'{"text": "a"}\n{"text": "b"}\n')})
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(dataset_id=answer.json()["id"]))
    return path


@pytest.fixture(scope="module")
def emptying(shared_api: ApiServer) -> Iterator[psycopg.Connection]:
    """Connection of `emptied_api` to the database of the file's API."""
    with psycopg.connect(shared_api.settings.database_url or "", autocommit=True) as connection:
        yield connection


@pytest.fixture
def emptied_api(shared_api: ApiServer, emptying: psycopg.Connection) -> Iterator[ApiServer]:
    """The API of the file, whose database and models are emptied behind each test: a start costs a tenth of a second.

    API keys, the storage, Redis and the memory of the process stay. For tests that leave nothing else: no changed
    schema, no change of the process, no stopped server.
    """
    yield shared_api
    eventually(lambda: _emptied(emptying), what="nothing else writes to the database")
    shutil.rmtree(shared_api.settings.models_folder, ignore_errors=True)


def _emptied(connection: psycopg.Connection) -> bool:
    try:
        delete_rows(connection)
    except (
        psycopg.errors.ForeignKeyViolation,
        psycopg.errors.DeadlockDetected,
        psycopg.errors.SerializationFailure,
    ):  # the dispatcher writes at the same time
        return False
    return True


def json_of(result: Result) -> Any:
    """The one JSON document on standard output."""
    return json.loads(result.stdout)
