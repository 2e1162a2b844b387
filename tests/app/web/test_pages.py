"""Promises about the dashboard, in a real browser."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import Engine

from app.infra.db import sync_engine
from app.infra.storage import Storage
from tests.browser import sign_in, window
from tests.factories import Trainer, make_dataset, make_run
from tests.server import ApiServer

HOSTILE = "<img src=x onerror=alert(1)> \x1b[31m&amp;"


@pytest.fixture(scope="module")
def engine(shared_api: ApiServer) -> Iterator[Engine]:
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


def start(api: ApiServer, engine: Engine, dataset: str, **body: Any) -> Trainer:
    """A run in training."""
    return Trainer(engine, make_run(api.client, dataset, **body)["id"]).begin(total=100)


def steps(trainer: Trainer, *numbers: int) -> None:
    for step in numbers:
        trainer.log(f"step {step} loss {1 / step:.4f}")
        trainer.metric(step, loss=1 / step, epoch=step / 50, learning_rate=1e-4)


class TestRuns:
    def test_change_without_a_reload_and_filters_are_in_the_address(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        made = make_run(shared_api.client, dataset, name="from pending to completed")
        row = page.get_by_role("row").filter(has_text="from pending to completed")
        expect(row).to_contain_text("Pending")
        trainer = Trainer(engine, made["id"]).begin(total=100)
        expect(row).to_contain_text("Running")
        steps(trainer, 1, 2, 3)
        trainer.complete()
        expect(row).to_contain_text("Completed")
        page.get_by_label("Search runs by name, tag or ID").fill("no such run")
        expect(page.get_by_text("No run matches the filters.")).to_be_visible()
        page.reload()
        expect(page.get_by_text("No run matches the filters.")).to_be_visible()
        page.get_by_role("button", name="Remove the filters").click()
        expect(row).to_be_visible()


class TestRun:
    def test_shows_each_line_and_step_once_and_heals_when_the_service_was_away(
        self, chromium: Browser, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset, name="live")
        steps(trainer, *range(1, 6))
        gone = (
            "ERR_CONNECTION_REFUSED",
            "ERR_EMPTY_RESPONSE",
            "ERR_INCOMPLETE_CHUNKED_ENCODING",
            "ERR_CONNECTION_RESET",
        )
        with window(chromium, shared_api.url, expected=gone) as context:
            page = sign_in(context, shared_api.client)
            page.goto(f"/runs/{trainer.run_id}")
            log = page.get_by_role("log", name="Lines of the log")
            expect(log.locator(".ln")).to_have_count(5)
            steps(trainer, *range(6, 11))
            expect(log.locator(".ln")).to_have_count(10)
            expect(page.locator(".tile").filter(has_text="Step").first).to_contain_text("10 of 100")
            shared_api.stop()
            expect(page.get_by_role("status").filter(has_text="Connection lost")).to_be_visible()
            steps(trainer, *range(11, 16))
            shared_api.start()
            expect(log.locator(".ln")).to_have_count(15, timeout=60_000)
            shown = [re.findall(r"step (\d+)", line)[0] for line in log.locator(".ln").all_inner_texts()]
            assert shown == [str(step) for step in range(1, 16)]
            expect(page.locator(".tile").filter(has_text="Step").first).to_contain_text("15 of 100")
            page.get_by_role("button", name="Stop").first.click()
            page.get_by_role("button", name="Save a checkpoint and stop").click()
            expect(page.get_by_role("button", name="Stopping …")).to_be_visible()
            trainer.checkpoint(15, kind="stop")
            trainer.cancel_on_request()
            expect(page.get_by_role("button", name="Resume")).to_be_visible()
            page.get_by_role("button", name="Resume").click()
            page.get_by_role("button", name="From the newest checkpoint").click()
            expect(page.get_by_text("resumed from")).to_be_visible()
            child = page.url.rpartition("/")[2]
            assert child != trainer.run_id
            page.get_by_role("button", name="Stop").click()
            expect(page.locator(".chip").first).to_have_text("Stopped")
            assert shared_api.client.get(f"/v1/runs/{child}").json()["status"] == "cancelled"

    def test_shows_hostile_text_as_text(self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str) -> None:
        trainer = start(shared_api, engine, dataset, name="<b>bold</b> <img src=x onerror=alert(1)>")
        trainer.log(HOSTILE, "<script>alert(1)</script>")
        trainer.events("sample", {"step": 1, "prompt": HOSTILE, "completion": "<i>x</i>"})
        page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
        page.goto(f"/runs/{trainer.run_id}")
        expect(page.get_by_role("heading", name="<b>bold</b> <img src=x onerror=alert(1)>")).to_be_visible()
        expect(page.get_by_text("<script>alert(1)</script>")).to_be_visible()
        page.goto(f"/runs/{trainer.run_id}?tab=samples")
        expect(page.get_by_text("<i>x</i>")).to_be_visible()
        assert page.locator("main img, main script, main i:has-text('x')").count() == 0
        trainer.fail("internal", HOSTILE)


class TestEveryPage:
    @pytest.fixture(scope="class")
    def addresses(self, shared_api: ApiServer, engine: Engine, dataset: str) -> list[str]:
        done = start(shared_api, engine, dataset, name="done", tags=["a"])
        steps(done, *range(1, 30))
        done.checkpoint(20)
        done.write_output(Storage(shared_api.settings))
        done.complete()
        failed = start(shared_api, engine, dataset, name="failed")
        steps(failed, 1, 2)
        failed.fail("out_of_memory", "CUDA out of memory")
        live = start(shared_api, engine, dataset, name="live one")
        steps(live, *range(1, 30))
        stored = shared_api.client.post("/v1/datasets", files={"file": ("rows.jsonl", b'{"text": "a <b> text"}\n')})
        tabs = ["log", "checkpoints", "samples", "configuration", "files", "history"]
        return [
            "/", "/experiments", "/datasets", f"/datasets/{stored.json()['id']}", "/workers", "/new",
            f"/new?from={done.run_id}", f"/compare?ids={done.run_id},{live.run_id}", f"/runs/{failed.run_id}",
            f"/runs/{live.run_id}", *(f"/runs/{done.run_id}?tab={tab}" for tab in tabs),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "options",
        [
            {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
            {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
        ],
        ids=["light", "dark on a phone"],
    )
    def test_is_accessible_and_fits_its_window(
        self, chromium: Browser, shared_api: ApiServer, addresses: list[str], options: dict[str, Any]
    ) -> None:
        found: dict[str, list[str]] = {}
        with window(chromium, shared_api.url, **options) as context:
            page = sign_in(context, shared_api.client)
            for address in addresses:
                page.goto(address)
                expect(page.locator("main h1")).to_be_visible()
                expect(page.locator("[aria-busy=true]")).to_have_count(0)
                wrong = [f"{one['id']}: {one['nodes'][0]['html']}" for one in Axe().run(page).response["violations"]]
                if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    wrong.append("it scrolls sideways")
                if wrong:
                    found[address] = wrong
        assert found == {}
