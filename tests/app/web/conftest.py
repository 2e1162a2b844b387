"""The browser and the database, for the tests of the dashboard."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page
from sqlalchemy import Engine

from app.infra.db import sync_engine
from tests.browser import chromium, sign_in, window
from tests.factories import make_dataset
from tests.server import ApiServer

__all__ = ["chromium"]


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
    """Engine for the database of the file's API."""
    engine = sync_engine(shared_api.settings.database_url or "", pool_size=0)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def dataset(engine: Engine) -> str:
    return make_dataset(engine)


@pytest.fixture
def page(chromium: Browser, shared_api: ApiServer) -> Iterator[Page]:
    """The page of all runs, signed in."""
    with window(chromium, shared_api.url) as context:
        yield sign_in(context, shared_api.client)
