"""A real browser, signed in to a real server; a test fails for what a user would find in the browser's console.

A conftest that imports the fixture `chromium` offers it to the tests of its folder.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect, sync_playwright

from tests.chromium import find_chromium

_PATIENCE_MS = 30_000
"""For a machine whose cores other tests use."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Chromium, one process for the file.

    Playwright keeps an event loop running in the thread until it ends. A test of another file in the same process could
    not start a loop of its own, so the fixture must not outlive its file.
    """
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


def launch(playwright: Playwright) -> Browser:
    """Start Chromium without a window; tests that need it are left out where there is none (`tests/not_run.py`)."""
    # Chromium's own sandbox does not work for root.
    arguments = ["--no-sandbox"] if os.getuid() == 0 else []
    # Addresses of another machine, as a team's browsers see the service; Chromium trusts plain HTTP from loopback only.
    arguments.append("--host-resolver-rules=MAP *.example 127.0.0.1")
    return playwright.chromium.launch(executable_path=find_chromium(), args=arguments)


@contextmanager
def window(
    chromium: Browser, url: str, *, expected: tuple[str, ...] = (), hosts: tuple[str, ...] = (), **options: object
) -> Iterator[BrowserContext]:
    """Open a window on the service at `url`, and watch its pages as `watched` does."""
    context = new_window(chromium, url, **options)
    with watched(context, url, expected=expected, hosts=hosts):
        try:
            yield context
        finally:
            context.close()


def new_window(chromium: Browser, url: str, **options: object) -> BrowserContext:
    """Open a window on the service at `url`, with no cookie and an empty cache; the caller closes it."""
    context = chromium.new_context(base_url=url, reduced_motion="reduce", **options)  # type: ignore[arg-type]
    context.set_default_timeout(_PATIENCE_MS)
    return context


@contextmanager
def watched(
    context: BrowserContext, url: str, *, expected: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
) -> Iterator[None]:
    """Watch the pages that are opened within.

    At the end, fail for console lines that contain none of `expected`, and for requests to others than the service at
    `url` and `hosts`.
    """
    problems: list[str] = []

    def watch(page: Page) -> None:
        page.on(
            "console",
            lambda line: (
                problems.append(f"console: {line.text} {line.location['url']}") if line.type != "debug" else None
            ),
        )
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda request: _check_host(request.url, (url, *hosts), problems))

    context.on("page", watch)
    try:
        yield
    finally:
        context.remove_listener("page", watch)
    assert [one for one in problems if not any(text in one for text in expected)] == []


def _check_host(url: str, known: tuple[str, ...], problems: list[str]) -> None:
    if urlsplit(url).scheme in ("http", "https") and urlsplit(url).netloc not in {
        urlsplit(one).netloc for one in known
    }:
        problems.append(f"request to another host: {url}")


def sign_in(context: BrowserContext, client: httpx.Client, host: str | None = None) -> Page:
    """Sign in with a link of `client`, which sends an API key; return the page, which shows all runs.

    `host`: name by which the browser knows the machine, instead of its address.
    """
    page = context.new_page()
    base = client.base_url if host is None else client.base_url.copy_with(host=host)
    link = client.post("/v1/session/links").json()["url"].partition("#")[2]
    page.goto(f"{base.join('/login')}#{link}")
    page.wait_for_url(str(base.join("/")))
    return page
