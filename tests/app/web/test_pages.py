"""Promises about the dashboard, in a real browser."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Dialog, Locator, Page, Route, TimeoutError, ViewportSize, expect
from sqlalchemy import Engine

from app.config import Settings
from app.contracts.schemas.runs.common import FACTS
from app.infra.db import sync_engine
from app.infra.storage import Storage
from app.workers import registry
from tests.browser import sign_in, window
from tests.factories import Trainer, make_dataset, make_run, mark_run
from tests.rows import add_worker
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually

HOSTILE = "<img src=x onerror=alert(1)> \u202e{{7*7}} \x1b[31m&amp; javascript:alert(1)"
_VISIBILITY = """
  let isHidden = false;
  Object.defineProperty(Document.prototype, 'hidden', { get: () => isHidden });
  window.setHidden = (value) => {
    isHidden = value;
    document.dispatchEvent(new Event('visibilitychange'));
  };
"""
"""Pages of a browser without a screen are all visible; with this, a test hides them."""
PHONE: ViewportSize = {"width": 390, "height": 844}
_TOO_WIDE = """() => {
  if (document.documentElement.scrollWidth <= innerWidth) return [];
  const isWide = (element) => element.getBoundingClientRect().right > innerWidth + 1;
  const isClipped = (element) => element.closest('.scroll, .lines, .code, .clip, .tabs, .vals');
  const wide = [...document.querySelectorAll('body *')].filter((element) => isWide(element) && !isClipped(element));
  return wide.slice(-1).map((element) => `it scrolls sideways for ${element.outerHTML.slice(0, 300)}`);
}"""


def _too_wide(page: Page) -> list[str]:
    """Return what does not fit the window, once charts have had the time to follow its size."""
    try:
        page.wait_for_function(f"() => ({_TOO_WIDE})().length === 0", timeout=10_000)
    except TimeoutError:
        found: list[str] = page.evaluate(_TOO_WIDE)
        return found
    return []


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


def resume(page: Page, source: str) -> None:
    """Resume the run of the page without a change."""
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name=source).click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()


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
        expect(page.get_by_label("Search runs by name, tag or ID")).to_have_value("")


class TestRun:
    def test_that_cannot_start_says_why_in_full(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id = make_run(shared_api.client, dataset)["id"]
        why = "No online worker that could take the run has the labels `site-b`. Start one with them."
        mark_run(engine, run_id, pending_reason={"code": "no_worker_with_labels", "message": why})
        page.goto(f"/runs/{run_id}")
        banner = page.get_by_role("status").filter(has_text=why.replace("`", ""))
        expect(banner).to_be_in_viewport()
        expect(banner.locator("code")).to_have_text("site-b")
        expect(page.locator(".timeline .ends")).to_contain_text("now")  # no end is predicted
        page.get_by_role("button", name="More actions").click()
        page.get_by_role("button", name="Change the priority …").click()
        page.get_by_role("dialog").get_by_label("Priority").fill("7")
        page.get_by_role("dialog").get_by_role("button", name="Save").click()
        page.get_by_role("button", name="More actions").click()
        expect(page.get_by_text("It is 7.")).to_be_visible()
        assert shared_api.client.get(f"/v1/runs/{run_id}").json()["priority"] == 7
        page.keyboard.press("Escape")
        shared_api.client.post(f"/v1/runs/{run_id}/stop")
        expect(banner).to_have_count(0)
        expect(page.locator(".tile").filter(has_text="Started")).to_contain_text("never")
        page.goto(f"/?search={run_id}")
        expect(page.get_by_role("row").filter(has_text="never started")).to_have_count(1)

    def test_shows_its_resources_in_words(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id = make_run(shared_api.client, dataset)["id"]
        page.goto(f"/runs/{run_id}")
        expect(page.locator(".meta .resources")).to_have_text("1 device")
        labels = ["site-b", "x" * 63]
        asked = {"devices": 4, "hosts": 2, "gpu": "h200", "labels": labels, "sharding": "full"}
        needs = {"kind": "cuda", "gpu": "h200", "labels": labels, "sharded": True, "sequence_parallel": 2}
        mark_run(engine, run_id, resources=asked, requirements=needs, devices_needed=4, hosts_needed=2)
        page.reload()
        expect(page.locator(".meta .resources")).to_have_text(
            f"4 GPUs (h200) on 2 hosts, model divided among them, 2 share each sequence, labels {', '.join(labels)}"
        )
        page.set_viewport_size(PHONE)
        assert _too_wide(page) == []
        shared_api.client.post(f"/v1/runs/{run_id}/stop")

    def test_shows_seconds_per_step_and_only_fields_that_differ(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset, config={"logging_steps": 5, "lora_r": 8})
        for step, seconds in ((5, 1.25), (10, 2.5)):
            trainer.metric(step, loss=1.0, extra={"step_seconds": seconds, "data_seconds": seconds / 5})
        page.goto(f"/runs/{trainer.run_id}?smoothing=0")
        expect(page.get_by_role("figure", name="Seconds per step: Seconds per step 0.5", exact=True)).to_be_visible()
        expect(page.get_by_role("figure", name=re.compile("Wait for data per step, seconds: .* 0.1$"))).to_be_visible()
        page.get_by_role("link", name="Configuration").click()
        rows = page.get_by_role("region", name="Configuration").locator("tbody tr")
        expect(rows.filter(has_text="lora_r")).to_have_count(1)
        expect(rows.filter(has_text="rlhf")).to_have_count(0)
        trainer.complete()

    def test_shows_the_values_that_data_and_device_decided_as_different(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset)
        resolved = {"loss_on": "completion", "extra": {"padding_free": True}, "epochs": 3.0}
        mark_run(engine, trainer.run_id, effective_config=resolved)
        page.goto(f"/runs/{trainer.run_id}?tab=configuration")
        rows = page.get_by_role("region", name="Configuration").locator("tbody tr")
        expect(rows.filter(has_text="loss_on")).to_contain_text("completion")
        expect(rows.filter(has_text="extra")).to_contain_text("padding_free")
        expect(rows.filter(has_text="epochs")).to_have_count(0)
        trainer.complete()

    def test_shows_what_computes_it_and_how_its_step_was_planned(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset)
        page.goto(f"/runs/{trainer.run_id}?tab=configuration")
        expect(page.get_by_role("region", name="Configuration")).to_be_visible()
        facts = page.get_by_role("region", name="Run facts")
        expect(facts).to_have_count(0)
        mark_run(engine, trainer.run_id, effective_config={"dtype": "bfloat16", "load_in_8bit": True})
        trainer.events("config", {"facts": FACTS})  # without a reload
        kernels = "attention varlen, norms liger-kernel 0.8.5, adapters fused, dropout Triton, loss head two products"
        expect(facts.get_by_role("row").filter(has_text="Kernels")).to_have_text(f"Kernels{kernels}")
        expect(facts.get_by_role("row").filter(has_text="Device")).to_contain_text("NVIDIA H100 80GB HBM3")
        expect(facts.get_by_role("row").filter(has_text="Precision")).to_contain_text("bfloat16, base in 8 bits")
        expect(facts.get_by_role("row").filter(has_text="Planned step")).to_contain_text(
            "2 rows × 2 micro-batches, 10 of 36 layers recomputed, measured peak 41.2 of 70.7 GiB, 1.46 s"
        )
        plans = page.get_by_role("region", name="Plans of a step").locator("tbody tr")
        expect(plans).to_have_text([re.compile("2 rows × 2 .*measured"), re.compile("4 rows × 1 .*predicted")])
        page.set_viewport_size(PHONE)
        assert _too_wide(page) == []
        trainer.complete()

    def test_that_failed_shows_code_in_its_messages(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset)
        trainer.fail("internal", "The value of `extra.steps` is wrong.")
        page.goto(f"/runs/{trainer.run_id}")
        expect(page.get_by_role("heading", name="The value of extra.steps is wrong.").locator("code")).to_be_visible()
        page.get_by_role("link", name="History").click()
        expect(page.get_by_role("listitem").locator("code").filter(has_text="extra.steps").first).to_be_visible()

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
            resume(page, "From the newest checkpoint")
            expect(page.get_by_text("resumed from")).to_be_visible()
            child = page.url.rpartition("/")[2]
            assert child != trainer.run_id
            page.get_by_role("button", name="Stop").click()
            expect(page.locator(".chip").first).to_have_text("Stopped")
            assert shared_api.client.get(f"/v1/runs/{child}").json()["status"] == "cancelled"

    def test_says_so_while_it_cannot_be_read_and_reads_it_again(
        self, chromium: Browser, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset, name="unread")
        steps(trainer, 1, 2)
        with window(chromium, shared_api.url, expected=("ERR_FAILED",)) as context:
            page = sign_in(context, shared_api.client)
            page.route("**/logs/lines*", lambda route: route.abort())
            page.goto(f"/runs/{trainer.run_id}")
            failed = page.get_by_role("alert").filter(has_text="The log lines could not be read, and are tried again")
            expect(failed).to_be_visible()
            expect(page.get_by_role("figure", name=re.compile("Loss: train 0"))).to_be_visible()
            page.unroute("**/logs/lines*")
            expect(page.get_by_role("log").locator(".ln")).to_have_count(2)
            expect(failed).to_have_count(0)

    def test_offers_the_export_that_its_method_has(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        for method, forms in (("lora", 1), ("full", 0)):
            trainer = start(shared_api, engine, dataset, config={"method": method})
            trainer.checkpoint(10)
            trainer.complete()
            page.goto(f"/runs/{trainer.run_id}?tab=checkpoints")
            page.get_by_role("button", name="Export …").click()
            dialog = page.get_by_role("dialog")
            expect(dialog.get_by_role("button", name="Export", exact=True)).to_be_visible()
            expect(dialog.get_by_label("Form")).to_have_count(forms)


class TestResume:
    def test_of_a_completed_run_trains_longer_on_other_devices(
        self, chromium: Browser, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset, config={"max_steps": 100, "batch_size": 4})
        trainer.checkpoint(100, kind="final")
        trainer.complete()
        mark_run(engine, trainer.run_id, backend="celery")  # which allows several devices
        add_worker(engine, devices=4, backends=["celery"])
        with window(chromium, shared_api.url, expected=("status of 422",)) as context:
            page = sign_in(context, shared_api.client)
            page.goto(f"/runs/{trainer.run_id}")
            resume(page, "From the newest checkpoint")
            dialog = page.get_by_role("dialog")
            expect(dialog.locator(".error-text")).to_contain_text("raise max_steps, epochs or stop_at_step")
            edges = [dialog.locator(part).bounding_box() or {} for part in ("footer .btn.primary", "input >> nth=0")]
            assert len({edge["x"] + edge["width"] for edge in edges}) == 1, "the buttons end where the fields do"
            count, devices = dialog.get_by_label("Steps in all"), dialog.get_by_label("Devices")
            expect(count).to_have_value("100")
            expect(devices).to_have_value("1")
            count.fill("many")
            devices.fill("none")
            dialog.get_by_role("button", name="Resume").click()
            expect(devices).to_have_attribute("aria-invalid", "true")
            devices.fill("3")
            dialog.get_by_role("button", name="Resume").click()
            expect(count).to_have_attribute("aria-invalid", "true")
            count.fill("150")
            dialog.get_by_role("button", name="Resume").click()
            expect(dialog.locator(".f").filter(has=page.get_by_label("Devices"))).to_contain_text("can be resumed on")
            devices.fill("2")
            dialog.get_by_role("button", name="Resume").click()
            expect(page.locator(".head .chip")).to_have_text("Pending")
        child = shared_api.client.get(f"/v1/runs/{page.url.rpartition('/')[2]}").json()
        assert (child["config"]["max_steps"], child["resources"]["devices"]) == (150, 2)
        assert (child["parent_run_id"], child["current_step"]) == (trainer.run_id, 100)
        shared_api.client.post(f"/v1/runs/{child['id']}/stop")

    def test_from_a_checkpoint_or_the_start_keeps_what_is_not_changed(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset, config={"epochs": 2})
        for step in (10, 20):
            trainer.checkpoint(step)
        trainer.fail()
        made = []
        for step, address in ((10, "?tab=checkpoints"), (0, "")):
            page.goto(f"/runs/{trainer.run_id}{address}")
            if step:
                page.get_by_role("button", name="Resume from here").last.click()
                page.get_by_role("dialog").get_by_role("button", name="Resume").click()
            else:
                resume(page, "From the start")
            expect(page.locator(".head .chip")).to_have_text("Pending")
            made.append(shared_api.client.get(f"/v1/runs/{page.url.rpartition('/')[2]}").json())
            shared_api.client.post(f"/v1/runs/{made[-1]['id']}/stop")
        assert [(one["current_step"], one["config"]["epochs"]) for one in made] == [(10, 2.0), (0, 2.0)]


class TestOverPlainHttp:
    HOST = "anneal.example"

    @pytest.fixture
    def remote(self, settings: Settings) -> Iterator[ApiServer]:
        """A service that a browser knows by a name, as on another machine."""
        with ThreadServer(settings.model_copy(update={"allowed_hosts": self.HOST})) as server:
            yield server

    @pytest.fixture
    def engine(self, settings: Settings) -> Iterator[Engine]:
        engine = sync_engine(settings.database_url or "", pool_size=0)
        yield engine
        engine.dispose()

    def test_from_another_machine_every_action_works(
        self, chromium: Browser, remote: ApiServer, engine: Engine
    ) -> None:
        """Browsers offer no clipboard and no random UUIDs there."""
        dataset = make_dataset(engine)
        failed = start(remote, engine, dataset, name="failed over plain HTTP")
        failed.checkpoint(10)
        failed.fail("internal", "it failed")
        with window(chromium, remote.url.replace("127.0.0.1", self.HOST)) as context:
            page = sign_in(context, remote.client, self.HOST)
            assert page.evaluate("isSecureContext") is False
            page.goto(f"/runs/{failed.run_id}")
            expect(page.get_by_role("heading", name="it failed")).to_be_visible()
            asked: list[str] = []

            def answer(dialog: Dialog) -> None:
                asked.append(dialog.default_value)
                dialog.dismiss()

            page.on("dialog", answer)
            page.get_by_label("Copy the ID of the run").or_(page.get_by_title("Copy the ID of the run")).click()
            assert asked == [failed.run_id]
            resume(page, "From the newest checkpoint")
            expect(page.locator(".head .chip")).to_have_text("Pending")
            page.get_by_role("button", name="Stop").click()
            expect(page.locator(".head .chip")).to_have_text("Stopped")
            page.goto(f"/new?dataset={dataset}")
            page.locator("#field-base_model").fill("any")
            page.get_by_text("Placement and restarts").click()
            page.locator("#field-backend").select_option("fake")
            page.get_by_role("button", name="Start the run").click()
            expect(page.locator(".head .chip")).to_have_text("Pending")
            remote.client.post(f"/v1/runs/{page.url.rpartition('/')[2]}/stop")


class TestCompare:
    def test_follows_runs_that_train(self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str) -> None:
        first, second = (start(shared_api, engine, dataset, name=name) for name in ("one", "two"))
        for trainer in (first, second):
            steps(trainer, 1, 2)
        page.goto(f"/compare?ids={first.run_id},{second.run_id}&smoothing=0")
        expect(page.get_by_role("figure", name=re.compile("Train loss: one 0.5"))).to_be_visible()
        steps(first, *range(3, 9))
        expect(page.get_by_role("figure", name=re.compile("Train loss: one 0.125"))).to_be_visible()

    def test_marks_the_best_of_results_that_differ_and_shows_other_resources(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        made = []
        for name, losses in (("one", (0.26741, 3.0)), ("two", (0.26749, 2.0)), ("three", (0.3, 2.0))):
            trainer = start(shared_api, engine, dataset, name=name)
            trainer.metric(1, loss=losses[0])
            trainer.events("eval", {"step": 1, "metrics": {"eval_loss": losses[1]}})
            trainer.complete()
            mark_run(engine, trainer.run_id, best_loss=losses[0])
            made.append(trainer.run_id)
        mark_run(engine, made[1], resources={"devices": 2})

        def marks(what: str) -> list[str]:
            row = page.get_by_role("row").filter(has=page.get_by_role("cell", name=what, exact=True))
            expect(row).to_be_visible()
            return ["best" if "best" in text else "" for text in row.get_by_role("cell").all_inner_texts()[1:]]

        page.goto(f"/compare?ids={','.join(made)}")
        assert marks("Lowest train loss") == ["best", "best", ""]
        assert marks("Best eval loss") == ["", "best", "best"]
        expect(page.get_by_role("row").filter(has_text="resources.devices")).to_contain_text("121")
        page.goto(f"/compare?ids={made[0]},{made[1]}")
        assert marks("Lowest train loss") == ["", ""]


class TestDatasets:
    def test_a_refused_file_shows_each_wrong_line_and_stores_nothing(
        self, chromium: Browser, shared_api: ApiServer
    ) -> None:
        rows = b'{"text": "right"}\n{"text": 7}\n{"text": "right"}\nno JSON\n'
        with window(chromium, shared_api.url, expected=("status of 422",)) as context:
            page = sign_in(context, shared_api.client)
            page.goto("/datasets")
            page.get_by_label("Files to upload").set_input_files(
                [{"name": "wrong.jsonl", "mimeType": "application/jsonl", "buffer": rows}]
            )
            upload = page.get_by_role("region", name="Upload of wrong.jsonl")
            expect(upload).to_contain_text("rejected, nothing was stored")
            expect(upload.get_by_role("listitem")).to_have_count(2)
            for line in ("line 2", "line 4"):
                expect(upload.get_by_role("listitem").filter(has_text=line)).to_have_count(1)
        assert shared_api.client.get("/v1/datasets", params={"search": "wrong"}).json()["data"] == []


class TestLog:
    def test_a_search_leads_into_the_middle_and_scrolling_to_both_ends(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset, name="long log")
        trainer.log(*(f"line {number}." for number in range(1, 4001)))
        page.goto(f"/runs/{trainer.run_id}?tab=log")
        log = page.get_by_role("log", name="Lines of the log")
        expect(log.get_by_text("line 4000.", exact=True)).to_be_visible()
        page.get_by_label("Search all lines of the log").fill("line 1000.")
        expect(page.get_by_text("1 of 1", exact=True)).to_be_visible()
        expect(log.locator(".hit")).to_contain_text("line 1000.")
        for edge, last in (("scrollHeight", "line 4000."), ("0", "line 1."), ("scrollHeight", "line 4000.")):
            reached = log.get_by_text(last, exact=True)
            eventually(lambda edge=edge, reached=reached: _scroll(log, edge, reached), what=last)  # type: ignore[misc]
        trainer.log("a new line")
        expect(log.get_by_text("a new line")).to_be_visible()
        shown = [int(re.findall(r"\d+", line)[0]) for line in log.locator(".ln > span").all_inner_texts()[:-1]]
        assert shown == list(range(shown[0], 4001)), "without a gap to the live lines"

    def test_of_one_level_or_wrapped_shows_every_line_that_it_should(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset, name="log of levels")
        trainer.events("log", {"line": "an early error", "stream": "stderr", "level": "error"})
        trainer.log(*(f"line {number}." for number in range(1, 3001)))
        page.goto(f"/runs/{trainer.run_id}?tab=log")
        log = page.get_by_role("log", name="Lines of the log")
        expect(log.get_by_text("line 3000.", exact=True)).to_be_visible()
        page.get_by_label("Level").select_option("error")
        expect(log.locator(".ln")).to_have_count(1)
        expect(log).to_contain_text("an early error")
        trainer.log("no error")
        trainer.events("log", {"line": "a late error", "stream": "stderr", "level": "error"})
        expect(log.locator(".ln")).to_have_count(2)
        page.get_by_label("Level").select_option("")
        expect(log.get_by_text("a late error")).to_be_visible()
        page.get_by_label("Wrap").check()
        for edge, last in (("0", "line 1."), ("scrollHeight", "a late error")):
            reached = log.get_by_text(last, exact=True)
            eventually(lambda edge=edge, reached=reached: _scroll(log, edge, reached), what=last)  # type: ignore[misc]
        page.get_by_label("Search all lines of the log").fill("line 700.")
        expect(log.locator(".hit")).to_be_in_viewport()
        page.get_by_role("link", name="Overview").click()
        expect(page.get_by_label("Follow")).to_be_checked()
        expect(log.get_by_text("a late error")).to_be_visible()


def _scroll(log: Locator, edge: str, reached: Locator) -> bool:
    log.evaluate(f"(box) => {{ box.scrollTop = box.{edge}; }}" if edge != "0" else "(box) => { box.scrollTop = 0; }")
    return reached.count() > 0 and reached.first.is_visible()


class TestNewRun:
    def test_errors_of_what_the_form_held_before_do_not_prevent_a_start(self, page: Page, dataset: str) -> None:
        checks: list[Route] = []
        page.route("**/v1/runs/validate", lambda route: checks.append(route))
        start = page.get_by_role("button", name="Start the run")
        page.goto(f"/new?dataset={dataset}")
        page.locator("#field-base_model").fill("any")
        page.get_by_text("Placement and restarts").click()
        wrong: dict[str, Any] = {"valid": False, "warnings": [], "effective_config": None}
        wrong["errors"] = [{"field": "config.base_model", "code": "model_not_found", "message": "No such model."}]
        eventually(lambda: (page.wait_for_timeout(20), checks)[1], what="a check")
        checks[0].fulfill(json=wrong)
        expect(start).to_be_disabled()
        page.locator("#field-backend").select_option("fake")
        eventually(lambda: (page.wait_for_timeout(20), len(checks) > 1)[1], what="another check")
        expect(page.get_by_text("No such model.").first).to_be_visible()
        expect(start).to_be_enabled()
        checks[1].fulfill(json=wrong)
        expect(start).to_be_disabled()

    def test_keeps_its_draft_over_a_reload_and_starts_what_it_shows(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        with_labels = add_worker(engine, labels=["site-b", "gpu=none"])
        with engine.begin() as connection:
            connection.execute(registry.mark_offline([with_labels]))
        page.goto(f"/new?dataset={dataset}")
        page.locator("#field-base_model").fill("any")
        page.get_by_role("radio", name="QLoRA").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("radio", name="LoRA Adapter on full weights", exact=True)).to_be_checked()
        expect(page.locator("#field-lora_r")).to_have_value("")
        page.locator("#field-lora_r").fill("none")
        page.locator("#field-learning_rate").fill("many")
        expect(page.get_by_text("This is not a number.")).to_be_visible()
        expect(page.get_by_role("button", name="Start the run")).to_be_disabled()
        page.locator("#field-learning_rate").fill("2e-4")
        page.get_by_text("Placement and restarts").click()
        page.locator("#field-kind").select_option("cpu")
        page.locator("#field-labels").fill("site-b, gpu=none")
        page.locator("#field-devices").fill("all")
        expect(page.get_by_label("Text of the request")).to_contain_text('devices: "all"')
        page.locator("#field-devices").fill("1")
        page.locator("#field-sequence_parallel").fill("2")
        expect(page.get_by_label("Text of the request")).to_contain_text("sequence_parallel: 2")
        expect(page.get_by_text("for anneal runs create -f run.yaml")).to_be_visible()
        page.locator("#field-sequence_parallel").fill("")
        page.locator("#field-expert_parallel").fill("2")
        expect(page.get_by_label("Text of the request")).to_contain_text("expert_parallel: 2")
        page.locator("#field-expert_parallel").fill("")
        page.locator("#field-priority").fill("7")
        page.locator("#field-max_restarts").fill("0")
        page.locator("#field-backend").select_option("fake")
        request = page.get_by_label("Text of the request")
        expect(request).to_contain_text("priority: 7")
        shown = request.inner_text()
        for line in ('labels: ["site-b","gpu=none"]', "max_restarts: 0", "lora_r: null", 'method: "lora"'):
            assert line in shown, shown
        page.reload()
        expect(request).to_have_text(shown)
        page.locator("#field-lora_r").fill("")
        expect(request).not_to_contain_text("lora_r")
        expect(page.get_by_role("region", name="Checks").get_by_text("valid", exact=True)).to_be_visible()
        page.get_by_role("button", name="Start the run").click()
        expect(page.locator(".head .chip")).to_have_text("Pending")
        made = shared_api.client.get(f"/v1/runs/{page.url.rpartition('/')[2]}").json()
        assert (made["method"], made["priority"], made["max_restarts"], made["backend"]) == ("lora", 7, 0, "fake")
        assert made["resources"]["kind"] == "cpu" and made["resources"]["labels"] == ["site-b", "gpu=none"]
        shared_api.client.post(f"/v1/runs/{made['id']}/stop")
        page.goto(f"/new?from={made['id']}")
        expect(request).to_contain_text('labels: ["site-b","gpu=none"]')
        page.locator("#field-name").fill("a copy")
        page.reload()
        expect(page.locator("#field-name")).to_have_value("a copy")

    def test_sends_what_was_typed_and_leads_to_what_is_wrong(
        self, chromium: Browser, shared_api: ApiServer, engine: Engine
    ) -> None:
        with window(chromium, shared_api.url, expected=("status of 422",)) as context:
            self._type(sign_in(context, shared_api.client), shared_api, engine)

    def _type(self, page: Page, shared_api: ApiServer, engine: Engine) -> None:
        pairs = make_dataset(engine, "preference", ("prompt", "chosen", "rejected"))
        page.goto(f"/new?dataset={pairs}")
        page.locator("#field-base_model").fill("any")
        page.get_by_role("radio", name="DPO").check()
        rate = page.locator("#field-learning_rate")
        expect(rate).to_have_attribute("placeholder", "5e-6")
        rate.fill("2e-4")  # the default of other methods
        request = page.get_by_label("Text of the request")
        expect(request).to_contain_text("learning_rate: 0.0002")
        page.get_by_text("Placement and restarts").click()
        page.locator("#field-backend").select_option("fake")
        page.locator("#field-devices").fill("some")
        wrong = page.locator("#error-resources\\.devices")
        expect(wrong).to_have_text("must be a number from 1 to 1,024, or all; a number is written without quotes")
        expect(wrong.locator("code")).to_have_text("all")
        page.locator("#field-devices").fill("")
        page.locator("#field-labels").fill("not a label")
        page.get_by_text("Placement and restarts").click()
        checks = page.get_by_role("region", name="Checks")
        checks.get_by_role("button", name=re.compile("resources.labels")).click()
        expect(page.locator("#field-labels")).to_be_focused()
        page.locator("#field-labels").fill("")
        page.keyboard.press("Tab")
        expect(checks.get_by_text("valid", exact=True)).to_be_visible()
        page.get_by_role("button", name="Start the run").click()
        expect(page.locator(".head .chip")).to_have_text("Pending")
        made = page.url.rpartition("/")[2]
        assert shared_api.client.get(f"/v1/runs/{made}").json()["config"]["learning_rate"] == 2e-4
        shared_api.client.post(f"/v1/runs/{made}/stop")
        page.goto(f"/new?from={made}")
        expect(request).to_contain_text("learning_rate: 0.0002")
        expect(request).not_to_contain_text("optim")


class TestTabs:
    def test_of_seven_the_visible_one_follows_and_the_others_catch_up(
        self, chromium: Browser, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        # Browsers allow six connections to a host, so a seventh stream would never open, nor would any request.
        trainer = start(shared_api, engine, dataset, name="in seven tabs")
        steps(trainer, 1)
        with window(chromium, shared_api.url) as context:
            context.add_init_script(_VISIBILITY)
            sign_in(context, shared_api.client).close()
            tabs = []
            for _ in range(7):
                for other in tabs[-1:]:
                    other.evaluate("setHidden(true)")
                tabs.append(context.new_page())
                tabs[-1].goto(f"/runs/{trainer.run_id}")
                expect(tabs[-1].get_by_role("log").locator(".ln")).to_have_count(1)
            steps(trainer, 2, 3)
            expect(tabs[-1].get_by_role("log").locator(".ln")).to_have_count(3)
            assert tabs[0].get_by_role("log").locator(".ln").count() == 1, "a hidden tab follows"
            tabs[-1].evaluate("setHidden(true)")
            for tab in tabs:
                tab.evaluate("setHidden(false)")
                expect(tab.get_by_role("log").locator(".ln")).to_have_count(3)
                expect(tab.locator(".tile").filter(has_text="Step").first).to_contain_text("3 of 100")
                tab.evaluate("setHidden(true)")


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
            f"/datasets/{dataset}", "/workers", "/new", f"/new?from={done.run_id}",
            f"/compare?ids={done.run_id},{live.run_id}", f"/runs/{failed.run_id}", f"/runs/{live.run_id}",
            f"/runs/{pending}", *(f"/runs/{done.run_id}?tab={tab}" for tab in tabs), "/login",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "options",
        [
            pytest.param(
                {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
                id="light",
                marks=pytest.mark.full,
            ),
            pytest.param({"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"}, id="dark"),
            pytest.param(
                {"viewport": PHONE, "color_scheme": "light", "has_touch": True},
                id="on a phone",
                marks=pytest.mark.full,
            ),
        ],
    )
    def test_is_accessible_and_fits_its_window(
        self, chromium: Browser, shared_api: ApiServer, addresses: list[str], options: dict[str, Any]
    ) -> None:
        found: dict[str, list[str]] = {}
        with window(chromium, shared_api.url, **options) as context:
            page = sign_in(context, shared_api.client)
            page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
            for address in addresses:
                page.goto(address)
                expect(page.locator("main h1")).to_be_visible()
                expect(page.locator("[aria-busy=true]")).to_have_count(0)
                wrong = [f"{one['id']}: {one['nodes'][0]['html']}" for one in Axe().run(page).response["violations"]]
                for size in (options["viewport"], PHONE):
                    page.set_viewport_size(size)
                    wrong += _too_wide(page)
                page.set_viewport_size(options["viewport"])
                if page.locator("img[src='x'], main script, [onerror]").count():
                    wrong.append("text became markup")
                if wrong:
                    found[address] = wrong
        assert not found, "\n".join(f"{address}: {one}" for address, wrong in found.items() for one in wrong)
