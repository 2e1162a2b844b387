"""A run that trains, and commands on a terminal, for the tests of commands."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app.infra.db import sync_engine
from tests.conftest import Anneal
from tests.factories import Trainer
from tests.server import ApiServer

Started = tuple[subprocess.Popen[bytes], int]


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    """Engine for the database of the file's API."""
    engine = sync_engine(shared_api.settings.database_url or "")
    yield engine
    engine.dispose()


@pytest.fixture
def trainer(anneal: Anneal, engine: Engine, run_file: Path) -> Trainer:
    """A run that trains, the only one that waited."""
    for other in json.loads(anneal("runs", "list", "--status", "pending", "--json").stdout)["data"]:
        anneal("runs", "stop", other["id"])
    run_id = anneal("runs", "create", "-f", str(run_file)).stdout.strip()
    return Trainer(engine, run_id).begin(total=100)


@pytest.fixture
def start(shared_api: ApiServer, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts a command on a terminal of its own; answers the process and the terminal's other end."""
    there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": shared_api.url, "ANNEAL_API_KEY": shared_api.key}
    started: list[Started] = []

    def run(*arguments: str, columns: int = 100) -> Started:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "app.cli.main", *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, **there, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"},
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        started.append((process, ours))
        return process, ours

    yield run
    for process, ours in started:
        process.kill()
        process.wait()
        os.close(ours)
