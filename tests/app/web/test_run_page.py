"""Promises about the page of a run, in a real browser."""

import re

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from sqlalchemy import Engine

from anneal.contracts.schemas.runs.common import FACTS
from tests.app.web.pages import PHONE, resume, start, steps, too_wide
from tests.browser import sign_in, window
from tests.factories import make_dataset, make_run, mark_run
from tests.rows import add_worker
from tests.server import ApiServer
from tests.waiting import eventually

_VISIBILITY = """
  let isHidden = false;
  Object.defineProperty(Document.prototype, 'hidden', { get: () => isHidden });
  window.setHidden = (value) => {
    isHidden = value;
    document.dispatchEvent(new Event('visibilitychange'));
  };
"""
"""Pages of a browser without a screen are all visible; with this, a test hides them."""

SERVICE_IS_AWAY = [
    "net::ERR_CONNECTION_REFUSED", "net::ERR_CONNECTION_RESET", "net::ERR_EMPTY_RESPONSE",
    "net::ERR_INCOMPLETE_CHUNKED_ENCODING", "status of 503",
]  # fmt: skip
"""Console messages about requests that the end of the service interrupts, and about later ones."""


def _refuse(route: Route) -> None:
    """Answer as the service does while its database is away."""
    route.fulfill(status=503, json={"code": "unavailable", "detail": "The database is away."})


def _refuse_changes(route: Route) -> None:
    if route.request.method == "PATCH":
        _refuse(route)
    else:
        route.fallback()


class TestRun:
    def test_run_that_cannot_start_shows_the_full_reason_and_takes_another_priority(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str, tolerated: list[str]
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
        dialog = page.get_by_role("dialog")
        field = dialog.get_by_label("Priority")
        field.fill("7")
        # The end of a selection outside the dialog closes nothing, and neither does a change that failed.
        field.hover()
        page.mouse.down()
        page.mouse.move(5, 5)
        page.mouse.up()
        page.route("**/v1/runs/*", _refuse_changes)
        tolerated.append("status of 503")
        dialog.get_by_role("button", name="Save").click()
        expect(dialog.get_by_role("alert")).to_have_text("The database is away.")
        page.unroute_all()
        expect(field).to_have_value("7")
        dialog.get_by_role("button", name="Save").click()
        expect(page.get_by_role("button", name="More actions")).to_be_focused()
        page.get_by_role("button", name="More actions").click()
        expect(page.get_by_text("It is 7.")).to_be_visible()
        assert shared_api.client.get(f"/v1/runs/{run_id}").json()["priority"] == 7
        page.keyboard.press("Escape")
        shared_api.client.post(f"/v1/runs/{run_id}/stop")
        expect(banner).to_have_count(0)
        expect(page.locator(".tile").filter(has_text="Started")).to_contain_text("never")
        page.goto(f"/?search={run_id}")
        expect(page.get_by_role("row").filter(has_text="never started")).to_have_count(1)

    @pytest.mark.full
    def test_run_page_shows_resources_in_words(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id = make_run(shared_api.client, dataset)["id"]
        page.goto(f"/runs/{run_id}")
        expect(page.locator(".meta .resources")).to_have_text("1 device")
        labels = ["site-b", "x" * 63]
        resources = {"devices": 4, "hosts": 2, "gpu": "h200", "labels": labels, "sharding": "full"}
        needs = {"kind": "cuda", "gpu": "h200", "labels": labels, "sharded": True, "sequence_parallel": 2}
        mark_run(engine, run_id, resources=resources, requirements=needs, devices_needed=4, hosts_needed=2)
        page.reload()
        expect(page.locator(".meta .resources")).to_have_text(
            f"4 GPUs (h200) on 2 hosts, model divided among them, 2 share each sequence, labels {', '.join(labels)}"
        )
        page.set_viewport_size(PHONE)
        assert too_wide(page) == []
        shared_api.client.post(f"/v1/runs/{run_id}/stop")

    @pytest.mark.full
    def test_run_page_shows_seconds_per_step_and_only_differing_fields(
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

    def test_run_page_marks_values_decided_by_data_and_device(
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

    def test_run_page_shows_kernels_and_step_plan(
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
        page.reload()
        expect(page.get_by_role("link", name="Configuration")).to_be_in_viewport(ratio=0.9)
        assert too_wide(page) == []
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(page.get_by_role("button", name="Stop without saving")).to_be_in_viewport(ratio=0.9)
        page.keyboard.press("Escape")
        trainer.complete()

    @pytest.mark.full
    def test_run_page_of_reinforcement_learning_shows_rewards_first(
        self, page: Page, shared_api: ApiServer, engine: Engine
    ) -> None:
        prompts = make_dataset(engine, "prompt", ("prompt",))
        options = {"method": "rlhf", "rlhf": {"rewards": [{"type": "length", "max": 8}]}}
        trainer = start(shared_api, engine, prompts, config=options, name="rewarded")
        for step in (1, 2):
            trainer.metric(step, loss=0.001, extra={"reward": step / 4})
        page.goto(f"/runs/{trainer.run_id}?smoothing=0")
        expect(page.locator(".tile").filter(has_text="Train reward")).to_contain_text("0.500")
        expect(page.locator("figure.chart").first).to_have_attribute("aria-label", re.compile("^Reward: train 0.5"))
        page.goto("/?search=rewarded")
        expect(page.get_by_role("img", name="Reward from 0.250 to 0.500")).to_be_visible()
        trainer.complete()

    @pytest.mark.full
    def test_zooms_into_a_dragged_part_in_all_charts_whether_they_were_in_sight_or_not(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset)
        for step in range(1, 41):
            measures = dict.fromkeys(("entropy", "kl", "tokens_per_second", "chosen", "rejected"), step / 7)
            trainer.metric(step, loss=3 / step, learning_rate=1e-4, grad_norm=1.5, extra=measures)
        trainer.events("eval", {"step": 40, "metrics": {"eval_loss": 1.5}})
        page.goto(f"/runs/{trainer.run_id}?smoothing=0")
        charts = page.locator("figure.chart")
        expect(charts.last).not_to_be_in_viewport()
        expect(page.get_by_role("figure", name=re.compile("^Loss: train 0.075"))).to_be_visible()
        box = charts.first.locator(".u-over").bounding_box() or {}
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] / 4, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, middle, steps=4)
        page.mouse.up()
        expect(page.get_by_role("button", name="Show all")).to_be_visible()
        low, high = (float(end) for end in page.evaluate("new URL(location).searchParams.get('zoom')").split(","))
        assert 10 < low < 11.5 and 20 < high < 21.5, "a quarter of the steps from 1 to 40"
        charts.last.scroll_into_view_if_needed()
        expect(charts.last).to_be_in_viewport()
        charts.last.locator(".u-over").dblclick()
        expect(page.get_by_role("button", name="Show all")).to_have_count(0)
        trainer.complete()

    def test_failed_run_page_shows_code_in_its_messages(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset)
        trainer.fail("internal", "The value of `extra.steps` is wrong.")
        page.goto(f"/runs/{trainer.run_id}")
        expect(page.get_by_role("heading", name="The value of extra.steps is wrong.").locator("code")).to_be_visible()
        page.get_by_role("link", name="History").click()
        expect(page.get_by_role("listitem").locator("code").filter(has_text="extra.steps").first).to_be_visible()

    def test_run_page_shows_each_line_and_step_once_after_an_outage(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str, tolerated: list[str]
    ) -> None:
        trainer = start(shared_api, engine, dataset, name="live")
        steps(trainer, *range(1, 6))
        tolerated += SERVICE_IS_AWAY
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

    def test_run_page_reports_an_unreadable_run_and_retries(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str, tolerated: list[str]
    ) -> None:
        trainer = start(shared_api, engine, dataset, name="unread")
        steps(trainer, 1, 2)
        tolerated.append("ERR_FAILED")
        page.route("**/logs/lines*", lambda route: route.abort())
        page.goto(f"/runs/{trainer.run_id}")
        failed = page.get_by_role("alert").filter(has_text="The log lines could not be read, and are tried again")
        expect(failed).to_be_visible()
        expect(page.get_by_role("figure", name=re.compile("Loss: train 0"))).to_be_visible()
        page.unroute("**/logs/lines*")
        expect(page.get_by_role("log").locator(".ln")).to_have_count(2)
        expect(failed).to_have_count(0)

    @pytest.mark.full
    def test_offers_the_export_that_its_method_has(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str, tolerated: list[str]
    ) -> None:
        tolerated.append("status of 422")  # the simulated runs of this test have no model to export
        for method, forms in (("lora", {"output": "merged"}), ("full", {})):
            trainer = start(shared_api, engine, dataset, config={"method": method})
            trainer.checkpoint(10)
            trainer.complete()
            page.goto(f"/runs/{trainer.run_id}?tab=checkpoints")
            page.get_by_role("button", name="Export …").click()
            dialog = page.get_by_role("dialog")
            expect(dialog.get_by_role("button", name="Export", exact=True)).to_be_visible()
            expect(dialog.get_by_label("Form")).to_have_count(len(forms))
            for form in forms.values():
                expect(dialog.get_by_label("GGUF file")).to_have_count(0)  # an adapter alone has none
                dialog.get_by_label("Form").select_option(form)
            dialog.get_by_label("GGUF file").select_option("Q4_K_M")
            with page.expect_request("**/export") as sent:
                dialog.get_by_role("button", name="Export", exact=True).click()
            assert sent.value.post_data_json == {**forms, "gguf": "Q4_K_M"}


class TestResume:
    @pytest.mark.full
    def test_resume_form_of_a_completed_run_trains_longer_on_other_devices(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str, tolerated: list[str]
    ) -> None:
        trainer = start(shared_api, engine, dataset, config={"max_steps": 100, "batch_size": 4})
        trainer.checkpoint(100, kind="final")
        trainer.complete()
        mark_run(engine, trainer.run_id, backend="celery")  # which allows several devices
        add_worker(engine, devices=4, backends=["celery"])
        tolerated.append("status of 422")
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

    def test_resume_form_keeps_fields_that_are_not_changed(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trainer = start(shared_api, engine, dataset, config={"epochs": 2})
        for step in (10, 20):
            trainer.checkpoint(step)
        trainer.fail()
        run_ids = []
        for step, address in ((10, "?tab=checkpoints"), (0, "")):
            page.goto(f"/runs/{trainer.run_id}{address}")
            if step:
                page.get_by_role("button", name="Resume from here").last.click()
                page.get_by_role("dialog").get_by_role("button", name="Resume").click()
            else:
                resume(page, "From the start")
            expect(page.locator(".head .chip")).to_have_text("Pending")
            run_ids.append(shared_api.client.get(f"/v1/runs/{page.url.rpartition('/')[2]}").json())
            shared_api.client.post(f"/v1/runs/{run_ids[-1]['id']}/stop")
        assert [(one["current_step"], one["config"]["epochs"]) for one in run_ids] == [(10, 2.0), (0, 2.0)]


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

    def test_log_filtered_by_level_or_wrapped_shows_every_matching_line(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str, tolerated: list[str]
    ) -> None:
        trainer = start(shared_api, engine, dataset, name="log of levels")
        trainer.events("log", {"line": "an early error", "stream": "stderr", "level": "error"})
        trainer.log(*(f"line {number}." for number in range(1, 3001)))
        page.goto(f"/runs/{trainer.run_id}?tab=log")
        log = page.get_by_role("log", name="Lines of the log")
        expect(log.get_by_text("line 3000.", exact=True)).to_be_visible()
        tolerated.append("status of 503")
        page.route("**/logs/lines?*", _refuse)
        page.get_by_label("Level").select_option("error")
        failure = page.get_by_role("region", name="Log").get_by_role("alert")
        expect(failure).to_have_text("The database is away.")
        page.unroute_all()
        page.get_by_label("Level").select_option("warning")
        page.get_by_label("Level").select_option("error")
        expect(failure).to_have_count(0)
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


class TestTabs:
    @pytest.mark.full
    def test_visible_tab_of_seven_follows_and_the_others_catch_up(
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
