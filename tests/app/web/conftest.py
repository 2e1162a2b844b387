"""The browser and the database, for the tests of the dashboard."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page
from sqlalchemy import Engine

from app.infra.db import sync_engine
from tests.browser import chromium, new_window, sign_in, watched
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


@pytest.fixture(scope="module")
def signed_in(chromium: Browser, shared_api: ApiServer) -> Iterator[BrowserContext]:
    """Window of the file, signed in; what the browser has loaded and compiled serves every test."""
    context = new_window(chromium, shared_api.url)
    sign_in(context, shared_api.client).close()
    yield context
    context.close()


@pytest.fixture
def page(signed_in: BrowserContext, shared_api: ApiServer) -> Iterator[Page]:
    """The page of all runs, signed in, in a tab of its own; the browser stores nothing that another test has chosen."""
    with watched(signed_in, shared_api.url):
        page = signed_in.new_page()
        page.goto("/")
        yield page
        page.evaluate("localStorage.clear()")
        for opened in signed_in.pages:
            opened.close()
