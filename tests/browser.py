"""A real browser, signed in to a real server; a test fails for what a user would find in the browser's console.

A conftest that imports the fixture `chromium` offers it to the tests of its folder.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Frame,
    Page,
    Playwright,
    Request,
    expect,
    sync_playwright,
)

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
    context: BrowserContext, url: str, *, expected: Sequence[str] = (), hosts: tuple[str, ...] = ()
) -> Iterator[None]:
    """Watch the pages that are open or are opened within.

    At the end, fail for a page or frame of another host, and for console lines that contain none of `expected`. A
    request to another host is such a line: the policy of the dashboard's pages forbids it. Pages that start on `hosts`
    have no such policy; then each request is looked at, which takes as much processor time as the pages themselves.
    """
    problems: list[str] = []
    foreign: list[str] = []
    allowed_hosts = {urlsplit(address).netloc for address in (url, *hosts)}

    def note_console(line: ConsoleMessage) -> None:
        if line.type != "debug":
            problems.append(f"console: {line.text} {line.location['url']}")

    def note_error(error: object) -> None:
        problems.append(f"error: {error}")

    def is_foreign(address: str) -> bool:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and parts.netloc not in allowed_hosts

    def note_navigation(frame: Frame) -> None:
        # The page of an error stands for the address that could not be reached.
        if is_foreign(frame.url) or frame.url.startswith("chrome-error:"):
            foreign.append(f"navigation to another host: {frame.url}")

    def note_request(request: Request) -> None:
        if is_foreign(request.url):
            foreign.append(f"request to another host: {request.url}")

    listeners: dict[Any, Callable[[Any], None]] = {
        "console": note_console,
        "pageerror": note_error,
        "framenavigated": note_navigation,
    }
    if hosts:
        listeners["request"] = note_request

    def watch(page: Page) -> None:
        note_navigation(page.main_frame)  # a popup has loaded its first address already
        for event, listener in listeners.items():
            page.on(event, listener)

    for page in context.pages:
        watch(page)
    context.on("page", watch)
    try:
        yield
    finally:
        context.remove_listener("page", watch)
        for page in context.pages:
            for event, listener in listeners.items():
                page.remove_listener(event, listener)
    assert foreign + [one for one in problems if not any(text in one for text in expected)] == []


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
