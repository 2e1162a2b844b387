"""A run that trains, for the tests of commands."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app.infra.db import sync_engine
from tests.conftest import Anneal
from tests.factories import Trainer
from tests.server import ApiServer


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
