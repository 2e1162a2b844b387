"""Runs that the tests of the dashboard watch, and what they do on its pages."""

from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, TimeoutError, ViewportSize
from sqlalchemy import Engine

from tests.factories import Trainer, make_run
from tests.server import ApiServer

PHONE: ViewportSize = {"width": 390, "height": 844}
HOSTILE = "<img src=x onerror=alert(1)> \u202e{{7*7}} \x1b[31m&amp; javascript:alert(1)"
"""Text of another person that a page must not take as markup."""
_TOO_WIDE = """() => {
  if (document.documentElement.scrollWidth <= innerWidth) return [];
  const isWide = (element) => element.getBoundingClientRect().right > innerWidth + 1;
  const isClipped = (element) => element.closest('.scroll, .lines, .code, .clip, .tabs, .vals');
  const wide = [...document.querySelectorAll('body *')].filter((element) => isWide(element) && !isClipped(element));
  return wide.slice(-1).map((element) => `it scrolls sideways for ${element.outerHTML.slice(0, 300)}`);
}"""


def too_wide(page: Page) -> list[str]:
    """Return what does not fit the window, once charts have had the time to follow its size."""
    try:
        page.wait_for_function(f"() => ({_TOO_WIDE})().length === 0", timeout=10_000)
    except TimeoutError:
        selectors: list[str] = page.evaluate(_TOO_WIDE)
        return selectors
    return []


def violations(page: Page) -> list[str]:
    """Return the rules of accessibility that the page breaks, each with the first element that does."""
    return [f"{rule['id']}: {rule['nodes'][0]['html']}" for rule in Axe().run(page).response["violations"]]


def start(api: ApiServer, engine: Engine, dataset: str, **body: Any) -> Trainer:
    """A run in training."""
    return Trainer(engine, make_run(api.client, dataset, **body)["id"]).begin(total=100)


def steps(trainer: Trainer, *numbers: int) -> None:
    for step in numbers:
        trainer.log(f"step {step} loss {1 / step:.4f}")
        trainer.metric(step, loss=1 / step, epoch=step / 50, learning_rate=1e-4)


def resume(page: Page, source: str) -> None:
    """Resume the run of the page without a change."""
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name=source).click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
