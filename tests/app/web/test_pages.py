"""Promises about the pages of the dashboard other than that of a run, in a real browser."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Dialog, Locator, Page, Route, expect
from sqlalchemy import Engine, update

from app.config import Settings
from app.infra.db import sync_engine
from app.tables.runs import Run
from app.workers import registry
from tests.app.web.pages import resume, start, steps
from tests.browser import sign_in, window
from tests.factories import Trainer, make_dataset, make_run, mark_run
from tests.rows import add_worker
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually

_IS_COVERED = """() => {
  const { left, top, width } = document.activeElement.getBoundingClientRect();
  const shown = document.elementFromPoint(left + width / 2, top + 2);
  const isSelf = document.activeElement.contains(shown) || shown?.contains(document.activeElement);
  return isSelf ? null : `${document.activeElement.outerHTML.slice(0, 200)} is under ${shown?.outerHTML.slice(0, 200)}`;
}"""
"""What lies over the element that has the focus; null if nothing does."""


class TestRuns:
    def test_change_without_a_reload_and_filters_are_in_the_address(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run = make_run(shared_api.client, dataset, name="from pending to completed")
        page.goto("/")
        row = page.get_by_role("row").filter(has_text="from pending to completed")
        expect(row).to_contain_text("Pending")
        trainer = Trainer(engine, run["id"]).begin(total=100)
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

    def test_start_page_without_trainings_has_a_sample_to_upload_and_evaluations_are_apart(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_ids = [make_run(shared_api.client, dataset, name="a measured model")["id"]]
        with engine.begin() as connection:  # whatever other tests have trained
            connection.execute(update(Run).values(task="evaluate"))
        page.goto("/")
        sample = page.get_by_label("Sample of a dataset").inner_text()
        kinds = page.get_by_role("group", name="Kind of runs")
        kinds.get_by_role("button", name="Evaluations").click()
        evaluation = page.get_by_role("row").filter(has_text="a measured model")
        expect(evaluation).to_be_visible()
        chats = shared_api.client.post("/v1/datasets", files={"file": ("chats.jsonl", sample.encode())}).json()
        assert (chats["format"], chats["rows"]) == ("chat", 2)
        run_ids.append(make_run(shared_api.client, chats["id"], name="on the sample")["id"])
        kinds.get_by_role("button", name="Training").click()
        training = page.get_by_role("row").filter(has_text="on the sample")
        expect(training).to_be_visible()
        expect(evaluation).to_have_count(0)
        kinds.get_by_role("button", name="All").click()
        expect(evaluation).to_be_visible()
        expect(training).to_be_visible()
        shared_api.client.post("/v1/runs/stop", json={"ids": run_ids})

    def test_runs_table_sorts_by_header_and_tags_stops_and_deletes_several(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        trains = start(shared_api, engine, dataset, name="b, in training", tags=["table"])
        done = [start(shared_api, engine, dataset, name=f"{letter}, done", tags=["table"]) for letter in "ac"]
        for number, trainer in enumerate(done):
            trainer.complete()
            mark_run(engine, trainer.run_id, best_loss=2.0 + number, final_loss=2.0 + number)
        page.goto("/?tag=table")
        names = page.locator("tbody .name")
        expect(names).to_have_text(["b, in training", "c, done", "a, done"])
        page.get_by_role("button", name="Run", exact=True).click()
        expect(names).to_have_text(["a, done", "b, in training", "c, done"])
        page.get_by_role("button", name="Lowest loss").click()
        expect(names).to_have_text(["a, done", "c, done", "b, in training"])
        page.get_by_role("button", name="Lowest loss").click()
        expect(page.get_by_role("columnheader", name="Lowest loss")).to_have_attribute("aria-sort", "descending")
        expect(names).to_have_text(["c, done", "a, done", "b, in training"])
        for order in ("Newest first", "Oldest first"):
            page.get_by_role("button", name="Created").click()
            expect(page.get_by_label("Order").locator("option:checked")).to_have_text(order)
        page.get_by_label("Order").select_option("best")
        expect(page.get_by_role("rowheader", name="qlora, by train loss, lowest first")).to_be_visible()
        page.get_by_role("button", name="Columns of the table").click()
        for column in ("Learning rate", "Tags"):
            page.get_by_role("button", name=column).click()
        page.keyboard.press("Escape")
        page.reload()
        row = page.get_by_role("row").filter(has_text="a, done")
        expect(row).to_contain_text("2.00e-4")
        expect(row.get_by_role("link", name="table")).to_be_visible()
        page.get_by_label("Select all runs of this page").check()
        dialog = self._change(page, "Tag …")
        dialog.get_by_label("Add tags").fill("kept")
        dialog.get_by_role("button", name="Save").click()
        expect(dialog).to_contain_text("3 runs changed.")
        dialog.get_by_role("button", name="Close").last.click()
        expect(row.get_by_role("link", name="kept")).to_be_visible()
        dialog = self._change(page, "Stop …")
        dialog.get_by_role("radio", name="Stop without saving").check()
        dialog.get_by_role("button", name="Stop").click()
        expect(dialog).to_contain_text("1 run asked to stop, 2 already so or ended.")
        dialog.get_by_role("button", name="Close").last.click()
        dialog = self._change(page, "Delete …")
        dialog.get_by_role("button", name="Delete").click()
        expect(dialog).to_contain_text("2 runs deleted.")
        expect(dialog.get_by_role("listitem")).to_contain_text("stop it first")
        dialog.get_by_role("button", name="Close").last.click()
        expect(names).to_have_text(["b, in training"])
        trains.cancel()

    @staticmethod
    def _change(page: Page, button: str) -> Locator:
        page.get_by_role("button", name=button).click()
        return page.get_by_role("dialog")


class TestCompare:
    @pytest.mark.full
    def test_comparison_page_follows_training_runs(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        first, second = (start(shared_api, engine, dataset, name=name) for name in ("one", "two"))
        for trainer in (first, second):
            steps(trainer, 1, 2)
        page.goto(f"/compare?ids={first.run_id},{second.run_id}&smoothing=0")
        expect(page.get_by_role("figure", name=re.compile("Train loss: one 0.5"))).to_be_visible()
        steps(first, *range(3, 9))
        expect(page.get_by_role("figure", name=re.compile("Train loss: one 0.125"))).to_be_visible()
        expect(page.get_by_text("No run has the curve “Eval loss”.")).to_be_visible()
        widths = page.locator(".charts > *").evaluate_all("boxes => boxes.map((box) => box.offsetWidth)")
        assert len(widths) == 2 and len(set(widths)) == 1, widths

    def test_marks_the_best_of_results_that_differ_and_shows_other_resources(
        self, page: Page, shared_api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_ids = []
        for name, losses in (("one", (0.26741, 3.0)), ("two", (0.26749, 2.0)), ("three", (0.3, 2.0))):
            trainer = start(shared_api, engine, dataset, name=name)
            trainer.metric(1, loss=losses[0])
            trainer.events("eval", {"step": 1, "metrics": {"eval_loss": losses[1]}})
            trainer.complete()
            mark_run(engine, trainer.run_id, best_loss=losses[0])
            run_ids.append(trainer.run_id)
        mark_run(engine, run_ids[1], resources={"devices": 2})

        def marks(what: str) -> list[str]:
            row = page.get_by_role("row").filter(has=page.get_by_role("cell", name=what, exact=True))
            expect(row).to_be_visible()
            return ["best" if "best" in text else "" for text in row.get_by_role("cell").all_inner_texts()[1:]]

        pairs = make_dataset(engine, "preference", ("prompt", "chosen", "rejected"))
        other = start(shared_api, engine, pairs, name="other", config={"method": "dpo"})
        other.metric(1, loss=0.1)
        other.complete()
        mark_run(engine, other.run_id, best_loss=0.1)
        page.goto(f"/compare?ids={','.join([*run_ids, other.run_id])}")
        expect(page.get_by_role("note")).to_contain_text("measure different things and cannot be compared")
        assert marks("Lowest train loss") == ["", "", "", ""]
        page.goto(f"/compare?ids={','.join(run_ids)}")
        assert page.get_by_role("note").count() == 0
        assert marks("Lowest train loss") == ["best", "best", ""]
        assert marks("Best eval loss") == ["", "best", "best"]
        expect(page.get_by_role("row").filter(has_text="resources.devices")).to_contain_text("121")
        page.goto(f"/compare?ids={run_ids[0]},{run_ids[1]}")
        assert marks("Lowest train loss") == ["", ""]


class TestDatasets:
    def test_a_refused_file_shows_each_wrong_line_and_stores_nothing(
        self, page: Page, shared_api: ApiServer, tolerated: list[str]
    ) -> None:
        rows = b'{"text": "right"}\n{"text": 7}\n{"text": "right"}\nno JSON\n'
        tolerated.append("status of 422")
        page.goto("/datasets")
        page.get_by_label("Files to upload").set_input_files(
            [{"name": "wrong.jsonl", "mimeType": "application/jsonl", "buffer": rows}]
        )
        upload = page.get_by_role("region", name="Upload of wrong.jsonl")
        expect(upload).to_contain_text("rejected, nothing was stored")
        expect(upload.get_by_role("listitem")).to_have_count(2)
        for line in ("line 2", "line 4"):
            expect(upload.get_by_role("listitem").filter(has_text=line)).to_have_count(1)
        for link in ("Workers", "Datasets"):  # what became of it is also shown to who comes back
            page.get_by_role("link", name=link, exact=True).click()
        expect(upload).to_contain_text("rejected, nothing was stored")
        assert shared_api.client.get("/v1/datasets", params={"search": "wrong"}).json()["data"] == []

    def test_next_page_of_rows_is_requested_once_while_it_is_read(self, page: Page, shared_api: ApiServer) -> None:
        rows = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(1, 13))
        uploaded = shared_api.client.post("/v1/datasets", files={"file": ("pages.jsonl", rows)})
        reads: list[Route] = []
        page.route(re.compile(r"/rows\?after="), lambda route: reads.append(route))
        page.goto(f"/datasets/{uploaded.json()['id']}")
        expect(page.get_by_text("1 to 10 of 12")).to_be_visible()
        following = page.get_by_role("button", name="Next")
        with page.expect_request(re.compile(r"/rows\?after=")):
            following.click()
        expect(following).to_be_disabled()
        reads[0].continue_()
        expect(page.get_by_text("11 to 12 of 12")).to_be_visible()

    def test_import_whose_dialog_was_closed_lists_its_dataset_without_navigation(
        self, page: Page, dataset: str
    ) -> None:
        imports: list[Route] = []
        page.route(re.compile("/v1/datasets$"), lambda route: imports.append(route))
        page.goto("/datasets")
        page.get_by_role("button", name="Import from the hub").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Dataset").fill("owner/name")
        with page.expect_request(re.compile("/v1/datasets$")):
            dialog.get_by_role("button", name="Import", exact=True).click()
        dialog.get_by_role("button", name="Cancel").click()
        expect(dialog).to_have_count(0)
        with page.expect_response(re.compile(r"/v1/datasets\?")):  # the list is read again
            imports[0].fulfill(status=201, json={"id": dataset})
        assert page.url.endswith("/datasets")


class TestWebhooks:
    def test_webhook_is_created_tested_sent_again_rotated_and_deleted(
        self, page: Page, shared_api: ApiServer, tolerated: list[str]
    ) -> None:
        tolerated.append("status of 422")
        page.goto("/webhooks")
        page.get_by_role("button", name="New webhook").click()
        dialog = page.get_by_role("dialog")
        address, checkbox = dialog.get_by_label("Address"), dialog.get_by_label("Status changes")
        expect(address).to_be_focused()
        field, text, box = address.bounding_box(), dialog.get_by_text("Status changes"), checkbox.bounding_box()
        assert field and field["height"] == 32, "as high as other fields"
        label = text.bounding_box()
        assert box and label and label["width"] < 160 and box["width"] < 20, "a checkbox stands beside its text"
        address.fill("https://127.0.0.1/hook")
        checkbox.check()
        dialog.get_by_role("button", name="Create").click()
        expect(dialog.get_by_role("alert")).to_contain_text("Address: leads to 127.0.0.1, which")
        expect(dialog.get_by_role("alert")).not_to_contain_text("send the request again")
        dialog.get_by_label("Address").fill("https://hooks.invalid/hook")
        dialog.get_by_role("button", name="Create").click()
        expect(dialog).to_contain_text("whsec_")
        dialog.get_by_role("button", name="It is stored").click()
        expect(page.get_by_role("heading", name="hooks.invalid")).to_be_visible()
        expect(page.get_by_text("Ends of runs, Status changes")).to_be_visible()
        page.get_by_role("button", name="Send a test").click()
        row = page.get_by_role("row").filter(has_text="test")
        expect(row).to_contain_text("hooks.invalid cannot be resolved: correct")
        expect(page.get_by_text("failing since")).to_be_visible()
        row.get_by_role("button", name="Send again").click()
        page.get_by_role("button", name="Rotate the secret").click()
        dialog.get_by_role("button", name="Rotate").click()
        expect(dialog).to_contain_text("whsec_")
        dialog.get_by_role("button", name="It is stored").click()
        page.get_by_role("button", name="Delete").click()
        dialog.get_by_role("button", name="Delete the webhook").click()
        expect(page.get_by_text("There are no webhooks yet.")).to_be_visible()

    def test_webhook_is_restricted_to_some_runs_disabled_and_its_deliveries_are_filtered(
        self, page: Page, shared_api: ApiServer
    ) -> None:
        created = {"url": "https://hooks.invalid/hook", "filter": {"base_model": "none"}}
        path = shared_api.client.post("/v1/webhooks", json=created).headers["location"]
        page.goto(path.removeprefix("/v1"))
        page.get_by_role("button", name="Edit").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Name").fill("failures")
        dialog.get_by_label("Base model").fill("")
        dialog.get_by_label("Tag").fill(" llama ")
        dialog.get_by_label("Task").select_option("train")
        dialog.get_by_label("Failed").check()
        dialog.get_by_role("button", name="Save").click()
        expect(page.get_by_role("heading", name="failures")).to_be_visible()
        changed = shared_api.client.get(path).json()
        assert changed["filter"] == {"tag": "llama", "task": "train", "status": ["failed"]}
        assert (changed["url"], changed["types"]) == (created["url"], ["end"])
        send = page.get_by_role("button", name="Send a test")
        page.get_by_role("button", name="Disable").click()
        expect(page.get_by_role("button", name="Enable")).to_be_visible()
        expect(send).to_be_disabled()
        assert shared_api.client.get(path).json()["enabled"] is False
        page.get_by_role("button", name="Enable").click()
        send.click()
        row = page.get_by_role("row").filter(has_text="test")
        expect(row).to_contain_text("hooks.invalid cannot be resolved: correct")
        page.get_by_role("button", name="Delivered").click()
        expect(page.get_by_text("No delivery has this status.")).to_be_visible()
        page.get_by_role("button", name="Failed").click()
        expect(row).to_be_visible()
        page.get_by_role("button", name="Edit").click()
        dialog.get_by_role("button", name="OpenAI").click()
        dialog.get_by_label("Jobs that are cancelled").uncheck()
        dialog.get_by_role("button", name="Save").click()
        expect(page.get_by_text("Jobs that succeed, Jobs that fail")).to_be_visible()
        assert shared_api.client.get(path).json()["format"] == "openai"
        assert shared_api.client.delete(path).status_code == 204


class TestNewRun:
    @pytest.mark.full
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

    def test_new_run_form_keeps_its_draft_over_a_reload_and_submits_it(
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
        checks = page.get_by_role("region", name="Checks")
        for place in (page.locator(".f", has=page.locator("#field-learning_rate")), checks):
            expect(place).to_contain_text("This is not a number.")
        expect(checks).not_to_contain_text("Choose a base model")
        page.locator("#field-batch_size").fill("0")
        expect(checks.get_by_role("button", name="config.batch_size")).to_be_visible()  # from the service, beside it
        expect(checks).to_contain_text("This is not a number.")
        expect(page.get_by_role("button", name="Start the run")).to_be_disabled()
        page.locator("#field-batch_size").fill("")
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
        created = shared_api.client.get(f"/v1/runs/{page.url.rpartition('/')[2]}").json()
        assert (created["method"], created["priority"], created["max_restarts"], created["backend"]) == (
            "lora",
            7,
            0,
            "fake",
        )
        assert created["resources"]["kind"] == "cpu" and created["resources"]["labels"] == ["site-b", "gpu=none"]
        shared_api.client.post(f"/v1/runs/{created['id']}/stop")
        page.goto(f"/new?from={created['id']}")
        expect(request).to_contain_text('labels: ["site-b","gpu=none"]')
        page.locator("#field-name").fill("a copy")
        page.reload()
        expect(page.locator("#field-name")).to_have_value("a copy")

    def test_new_run_form_sends_its_fields_and_shows_errors(
        self, page: Page, shared_api: ApiServer, engine: Engine, tolerated: list[str]
    ) -> None:
        tolerated.append("status of 422")
        _namesake, pairs = (make_dataset(engine, "preference", ("prompt", "chosen", "rejected")) for _ in range(2))
        page.goto(f"/new?dataset={pairs}")
        page.locator("#field-base_model").fill("any")
        names = page.locator("#field-dataset_id option")
        expect(names.filter(has_text="preference.jsonl").last).to_be_attached()
        assert len(set(names.all_inner_texts())) == names.count() > 2, "datasets of one name are told apart"
        assert page.locator("label code").count() == 0, "one label a field"
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
        expect(wrong).to_have_text("must be a number from 1 to 1,024, or all")
        expect(wrong.locator("code")).to_have_text("all")
        expect(page.locator("#field-devices")).to_have_accessible_description(re.compile("must be a number from 1"))
        page.locator("#field-devices").fill("")
        page.locator("#field-labels").fill("not a label")
        page.get_by_text("Placement and restarts").click()
        checks = page.get_by_role("region", name="Checks")
        checks.get_by_role("button", name=re.compile("resources.labels")).click()
        expect(page.locator("#field-labels")).to_be_focused()
        page.locator("#field-labels").fill("")
        page.locator("summary").filter(has_text="Logging").click()
        expect(page.get_by_role("button", name="Start the run")).to_be_in_viewport()
        for _ in range(30):
            page.keyboard.press("Shift+Tab")
            assert page.evaluate(_IS_COVERED) is None
        expect(checks.get_by_text("valid", exact=True)).to_be_visible()
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
        page.get_by_role("button", name="Start the run").evaluate("button => { button.click(); button.click(); }")
        expect(page.locator(".head .chip")).to_have_text("Pending")
        assert [url for url in sent if url.endswith("/v1/runs")] == [f"{shared_api.url}/v1/runs"], (
            "clicked twice at once"
        )
        run_id = page.url.rpartition("/")[2]
        assert shared_api.client.get(f"/v1/runs/{run_id}").json()["config"]["learning_rate"] == 2e-4
        shared_api.client.post(f"/v1/runs/{run_id}/stop")
        page.goto(f"/new?from={run_id}")
        expect(request).to_contain_text("learning_rate: 0.0002")
        expect(request).not_to_contain_text("optim")


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

    def test_dashboard_over_plain_http_from_another_machine_works(
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
            questions: list[str] = []

            def answer(dialog: Dialog) -> None:
                questions.append(dialog.default_value)
                dialog.dismiss()

            page.on("dialog", answer)
            page.get_by_label("Copy the ID of the run").or_(page.get_by_title("Copy the ID of the run")).click()
            assert questions == [failed.run_id]
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


_COUNT_WAITS = """() => {
  window.waits = new Set();
  const { setTimeout: wait, clearTimeout: cancel } = window;
  window.setTimeout = (work, ms) => {
    const id = wait(work, ms);
    if (ms === 3000) window.waits.add(id);
    return id;
  };
  window.clearTimeout = (id) => {
    window.waits.delete(id);
    cancel(id);
  };
}"""


class TestStart:
    def test_retries_by_hand_without_the_service_keep_one_pending_retry(self, page: Page, tolerated: list[str]) -> None:
        tolerated.append("net::ERR_FAILED")
        page.route("**/v1/session", lambda route: route.abort())
        page.goto("/")
        button = page.get_by_role("button", name="Try again")
        button.wait_for()
        page.evaluate(_COUNT_WAITS)
        for _ in range(3):
            with page.expect_event("requestfailed"):
                button.click()
        assert page.evaluate("window.waits.size") <= 1
        page.unroute_all()
        expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
