"""Promises about every page of the dashboard: accessible, within its window, and with hostile text shown as text."""

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Dialog, Page, ViewportSize, expect
from sqlalchemy import Engine

from app.infra.storage import Storage
from tests.app.web.pages import HOSTILE, PHONE, start, steps, too_wide, violations
from tests.browser import sign_in, window
from tests.factories import Trainer, make_run
from tests.rows import add_worker
from tests.server import ApiServer

_AUDITED = re.compile(
    r"/|/(experiments|datasets|workers|new|login)|/(compare|try).*|/webhooks/.*|"
    r"/runs/.*tab=(log|checkpoints|configuration)"
)
"""A page of each kind; `make test-all` audits all."""
_LIKE_OTHERS = re.compile(r"/new\?from=|tab=files$")
"""Pages that only `make test-all` opens."""
DESKTOP: ViewportSize = {"width": 1440, "height": 900}


class TestEveryPage:
    """With hostile text in every field that another person can write."""

    @pytest.fixture(scope="class")
    def addresses(self, shared_api: ApiServer, engine: Engine) -> list[str]:
        rows = json.dumps(
            {"messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]}
        )
        files = {"file": ("rows.jsonl", f"{rows}\n".encode())}
        dataset = shared_api.client.post("/v1/datasets", files=files, data={"name": HOSTILE}).json()["id"]
        named = {"name": HOSTILE, "description": HOSTILE, "tags": [HOSTILE]}
        experiment = shared_api.client.post("/v1/experiments", json=named).json()["id"]
        hook = {"url": "https://hooks.invalid/x", "name": HOSTILE, "filter": {"tag": HOSTILE}}
        webhook = shared_api.client.post("/v1/webhooks", json=hook).json()["id"]
        shared_api.client.post(f"/v1/webhooks/{webhook}/test").raise_for_status()
        add_worker(engine, memory_mb=[24_000, 24_000], host=HOSTILE)

        def hostile(name: str) -> Trainer:
            trainer = start(
                shared_api, engine, dataset, name=f"{name} {HOSTILE}", tags=[HOSTILE], experiment_id=experiment
            )
            steps(trainer, *range(1, 30))
            trainer.log(HOSTILE, "<script>alert(1)</script>")
            trainer.events("sample", {"step": 1, "prompt": HOSTILE, "completion": HOSTILE})
            return trainer

        done, failed, live = (hostile(name) for name in ("done", "failed", "live"))
        done.checkpoint(20)
        done.write_output(Storage(shared_api.settings))
        done.complete()
        failed.fail("out_of_memory", HOSTILE)
        pending = make_run(shared_api.client, dataset, name=HOSTILE)["id"]
        tabs = ["log", "checkpoints", "samples", "configuration", "files", "history"]
        return [
            "/", f"/?search={HOSTILE}", "/experiments", f"/experiments/{experiment}", "/datasets",
            f"/datasets/{dataset}", "/webhooks", f"/webhooks/{webhook}", "/workers", "/new", f"/new?from={done.run_id}",
            f"/compare?ids={done.run_id},{live.run_id}", f"/runs/{failed.run_id}", f"/runs/{live.run_id}",
            f"/runs/{pending}", *(f"/runs/{done.run_id}?tab={tab}" for tab in tabs),
            f"/try?run={done.run_id}", "/login",
        ]  # fmt: skip

    @pytest.mark.full
    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({"viewport": DESKTOP, "color_scheme": "light"}, id="light"),
            pytest.param({"viewport": DESKTOP, "color_scheme": "dark"}, id="dark"),
            pytest.param({"viewport": PHONE, "color_scheme": "light", "has_touch": True}, id="on a phone"),
        ],
    )
    def test_every_page_is_accessible_and_fits_its_window(
        self, chromium: Browser, shared_api: ApiServer, addresses: list[str], options: dict[str, Any]
    ) -> None:
        with window(chromium, shared_api.url, **options) as context:
            page = sign_in(context, shared_api.client)
            assert problems_of(page, addresses, options["viewport"]) == []

    def test_fits_its_window_shows_markup_as_text_and_is_accessible_if_it_is_the_first_of_its_kind(
        self, page: Page, addresses: list[str]
    ) -> None:
        assert sum(_AUDITED.fullmatch(address) is not None for address in addresses) >= 8
        page.emulate_media(color_scheme="dark")
        assert problems_of(page, [it for it in addresses if not _LIKE_OTHERS.search(it)], DESKTOP, _AUDITED) == []
        page.emulate_media(color_scheme="light")


def problems_of(
    page: Page, addresses: list[str], viewport: ViewportSize, audited: re.Pattern[str] = re.compile(".*")
) -> list[str]:
    """Return what is wrong with the pages at the addresses.

    `audited` are those whose accessibility is checked, and that are also looked at in the window of a phone.
    """

    def fail(dialog: Dialog) -> None:
        pytest.fail(f"a script ran: {dialog.message}")

    page.on("dialog", fail)
    problems: list[str] = []
    for address in addresses:
        page.set_viewport_size(viewport)
        page.goto(address)
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        page_problems = violations(page) if audited.fullmatch(address) else []
        page_problems += too_wide(page)
        if viewport != PHONE and audited.fullmatch(address):
            page.set_viewport_size(PHONE)
            page_problems += too_wide(page)
        if page.locator("img[src='x'], main script, [onerror]").count():
            page_problems.append("text became markup")
        problems += [f"{address}: {what}" for what in page_problems]
    page.remove_listener("dialog", fail)
    return problems
