"""The browser and the database, for the tests of the dashboard."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, ViewportSize
from sqlalchemy import Engine

from app.infra.db import sync_engine
from tests.browser import chromium, new_window, sign_in, watched
from tests.factories import make_dataset
from tests.server import ApiServer

__all__ = ["chromium"]

_WINDOW: ViewportSize = {"width": 1280, "height": 720}
"""As a new tab has it."""


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
def tab(chromium: Browser, shared_api: ApiServer) -> Iterator[Page]:
    """Signed-in tab of the file: a new one costs half a second, and this one has loaded and compiled the modules."""
    context = new_window(chromium, shared_api.url)
    yield sign_in(context, shared_api.client)
    context.close()


@pytest.fixture
def tolerated() -> list[str]:
    """Parts of the lines that a test makes the browser write to its console; the test adds them."""
    return []


@pytest.fixture
def page(tab: Page, shared_api: ApiServer, tolerated: list[str]) -> Iterator[Page]:
    """The tab, of which the test opens the page that it needs; nothing in it is left of another test."""
    with watched(tab.context, shared_api.url, expected=tolerated):
        yield tab
        for opened in tab.context.pages:
            if opened != tab:
                opened.close()
        tab.unroute_all()
        tab.goto("/healthz")  # of the same origin, so that its storage can be cleared
        tab.evaluate("localStorage.clear(); sessionStorage.clear()")
        tab.set_viewport_size(_WINDOW)
