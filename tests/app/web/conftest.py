"""The browser, for the tests of the dashboard."""

from tests.browser import chromium

__all__ = ["chromium"]
