"""What tests of the command line share: a command that runs in an empty folder, and a run to make."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner, Result

from app.cli.main import cli
from app.infra.home_lock import HomeLock
from app.infra.private_files import write_private_json
from tests.databases import delete_rows
from tests.server import ApiServer
from tests.waiting import eventually

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
