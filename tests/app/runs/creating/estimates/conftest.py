"""Emptied service with the base model `qwen`."""

import json
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from app.config import Settings
from app.infra.db import sync_engine
from tests.app.runs.creating.estimates.estimating import QWEN
from tests.factories import make_model
from tests.server import ApiServer


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def engine(api: ApiServer) -> Iterator[Engine]:
    engine = sync_engine(api.settings.database_url or "")
    (make_model(api.settings, "qwen") / "config.json").write_text(json.dumps(QWEN))
    yield engine
    engine.dispose()
