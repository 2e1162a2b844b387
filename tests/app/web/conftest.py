"""The browser and the database, for the tests of the dashboard."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from app.infra.db import sync_engine
from tests.browser import chromium
from tests.server import ApiServer

__all__ = ["chromium"]


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    """Engine for the database of the file's API."""
    engine = sync_engine(shared_api.settings.database_url or "", pool_size=0)
    yield engine
    engine.dispose()
