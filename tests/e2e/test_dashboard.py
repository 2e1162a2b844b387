"""Promises about the dashboard with the whole service: nothing needs a shell, and no failure costs a line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser import sign_in, window
from tests.e2e.conftest import TrainingStack
from tests.waiting import eventually
from tests.worker.training.tiny import make_chat_dataset

pytestmark = pytest.mark.usefixtures("ends")

_TRAINING_MS = 120_000
_AWAY = ("ERR_", "status of 50")
"""Console lines of a browser whose service or whose service's database is away."""


@pytest.fixture
def page(stack: TrainingStack, chromium: Browser) -> Iterator[Page]:
    """The page of all runs, signed in."""
    with window(chromium, stack.api.url) as context:
        yield sign_in(context, stack.client)


def chip(page: Page) -> Locator:
    """The status of the run that the page shows."""
    return page.locator(".head .chip")


def tab(page: Page, name: str) -> None:
    """Show a part of the run."""
    page.get_by_role("navigation", name="Parts of the run").get_by_role("link", name=name).click()


def menu(page: Page, name: str, item: str) -> None:
    """Choose an item of a menu."""
    page.get_by_role("button", name=name, exact=True).click()
    page.get_by_role("button", name=item).or_(page.get_by_role("link", name=item)).first.click()


def test_dashboard_trains_a_model_from_a_file_without_a_shell(page: Page, stack: TrainingStack, tmp_path: Path) -> None:
    page.get_by_role("link", name="Datasets").click()
    page.get_by_label("Files to upload").set_input_files(make_chat_dataset(tmp_path / "questions.jsonl", 40))
    page.get_by_role("link", name="40 rows of format chat").click()
    expect(page.get_by_role("heading", name="questions.jsonl")).to_be_visible()
    page.get_by_role("link", name="New run on it").click()
    page.get_by_label("Base model").fill("tiny")
    page.get_by_role("radio", name="LoRA Adapter on full weights", exact=True).click()
    for name, value in (("max_steps", "4"), ("max_seq_length", "64"), ("batch_size", "2"), ("lora_r", "4")):
        page.locator(f"#field-{name}").fill(value)
    expect(page.get_by_role("region", name="Checks").get_by_text("valid", exact=True)).to_be_visible()
    expect(page.get_by_role("region", name="Estimate")).to_contain_text("Memory")
    page.get_by_role("button", name="Start the run").click()
    expect(chip(page)).to_have_text("Completed", timeout=_TRAINING_MS)
    expect(page.locator(".tile").filter(has_text="Step").first).to_contain_text("4 of 4")
    tab(page, "Files")
    with page.expect_download() as download:
        page.get_by_role("link", name="adapter_model.safetensors").click()
    run_id = page.url.rpartition("/")[2].partition("?")[0]
    stored = stack.client.get(f"/v1/runs/{run_id}/artifacts/adapter_model.safetensors").content
    assert download.value.path().read_bytes() == stored
    page.get_by_text("Records of attempt 1").click()
    records = page.get_by_role("region", name="Files of attempt 1")
    expect(records.get_by_role("link", name="metrics.jsonl")).to_be_visible()


@pytest.mark.full
def test_stop_resume_and_every_action(page: Page, stack: TrainingStack) -> None:
    run_id = stack.train(max_steps=50_000, save_steps=50_000, logging_steps=1, eval_split=0.1, eval_steps=50_000)
    page.goto(f"/runs/{run_id}")
    expect(chip(page)).to_have_text("Running", timeout=_TRAINING_MS)
    actions: list[tuple[str, str, Callable[[Locator], object]]] = [
        ("Save a checkpoint now", "Save a checkpoint now", lambda dialog: dialog.get_by_label("Pin it").check()),
        ("Evaluate now", "Evaluate now", lambda dialog: None),
        ("Generate samples …", "Generate samples", lambda dialog: dialog.get_by_label("Prompts").fill("what is row 3")),
        (
            "Change the learning rate …",
            "Change the learning rate",
            lambda dialog: dialog.get_by_label("New peak learning rate").fill("1e-6"),
        ),
        ("Train longer …", "Train longer", lambda dialog: dialog.get_by_label("New total number").fill("60000")),
    ]
    for item, title, fill in actions:
        menu(page, "More actions", item)
        dialog = page.get_by_role("dialog")
        fill(dialog)
        dialog.get_by_role("button", name=title).click()
        expect(dialog).to_have_count(0)
    tab(page, "History")
    rows = page.get_by_role("region", name="Actions").locator("tbody tr")
    expect(rows).to_have_count(5)
    expect(rows.filter(has_text="done")).to_have_count(5, timeout=_TRAINING_MS)
    expect(page.locator(".tile").filter(has_text="Step").first).to_contain_text("of 60,000")
    tab(page, "Samples")
    expect(page.get_by_text("what is row 3").first).to_be_visible()
    tab(page, "Checkpoints")
    expect(page.get_by_role("button", name="Unpin the checkpoint")).to_have_count(1)

    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("button", name="Save a checkpoint and stop").click()
    expect(chip(page)).to_have_text("Stopped", timeout=_TRAINING_MS)
    stopped = stack.run(run_id)
    menu(page, "Resume", "From the newest checkpoint")
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(page.get_by_text("resumed from")).to_be_visible()
    child = page.url.rpartition("/")[2].partition("?")[0]
    expect(chip(page)).to_have_text("Running", timeout=_TRAINING_MS)
    stack.until_step(child, stopped["current_step"] + 1)
    menu(page, "Stop", "Stop without saving")
    expect(chip(page)).to_have_text("Stopped", timeout=_TRAINING_MS)

    # What is left of the first run: an export of its checkpoint, a name, and its end.
    page.goto(f"/runs/{run_id}?tab=checkpoints")
    page.get_by_role("button", name="Export …").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Export").click()
    expect(chip(page)).to_have_text("Completed", timeout=_TRAINING_MS)
    export = page.url.rpartition("/")[2].partition("?")[0]
    assert stack.run(export)["task"] == "export" and stack.run(export)["fine_tuned_model"]
    menu(page, "More actions", "Rename …")
    page.get_by_role("dialog").get_by_label("Name").fill("exported by hand")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="exported by hand")).to_be_visible()
    menu(page, "More actions", "Pin")
    expect(page.locator(".head").get_by_text("pinned")).to_be_visible()
    menu(page, "More actions", "Unpin")
    expect(page.locator(".head").get_by_text("pinned")).to_have_count(0)
    menu(page, "More actions", "Delete …")
    page.get_by_role("dialog").get_by_role("button", name="Delete the run").click()
    page.wait_for_url(f"{stack.api.url}/")
    assert stack.client.get(f"/v1/runs/{export}").status_code == 404


@pytest.mark.full
def test_a_killed_service_and_a_killed_database_lose_and_double_no_line(
    stack: TrainingStack, chromium: Browser
) -> None:
    run_id = stack.train(max_steps=50_000, save_steps=50_000, logging_steps=50)
    with window(chromium, stack.api.url, expected=_AWAY) as context:
        page = sign_in(context, stack.client)
        page.goto(f"/runs/{run_id}")
        expect(chip(page)).to_have_text("Running", timeout=_TRAINING_MS)
        page.get_by_label("Wrap").check()  # all lines are in the page
        stack.api.kill()
        expect(page.get_by_role("status").filter(has_text="Connection lost")).to_be_visible()
        stack.api.start()
        stack.api.wait_until_up()
        _further_steps(stack, page, run_id)
        postgres = stack.servers.postgres
        stack.kill(postgres)
        other = context.new_page()
        other.goto("/datasets")
        expect(other.get_by_role("alert")).to_contain_text("database")
        stack.start(postgres)
        _further_steps(stack, page, run_id)
        expect(other.get_by_role("link", name="mixed")).to_be_visible()
        # On a slow machine the lease may be over, and the run wait again: then the page offers another way to stop.
        stack.stop(run_id, save_checkpoint=False)
        expect(chip(page)).to_have_text("Stopped", timeout=_TRAINING_MS)
        written = stack.client.get(f"/v1/runs/{run_id}/logs/lines", params={"limit": 1000}).json()
        assert not written["has_more"]
        lines = [line["line"] for line in written["data"]]
        expect(page.get_by_role("log").locator(".ln")).to_have_count(len(lines))
        assert page.get_by_role("log").locator(".ln > span").all_text_contents() == lines


def _further_steps(stack: TrainingStack, page: Page, run_id: str) -> None:
    """Wait until the page shows a step that the run had not reached."""
    reached: dict[str, Any] = eventually(lambda: _answer(stack, run_id), timeout=60, what="the service answers")
    tile = page.locator(".tile").filter(has_text="Step").first
    eventually(
        lambda: int(tile.inner_text().split("of")[0].split()[-1].replace(",", "")) > reached["current_step"],
        timeout=60,
        what="a further step in the page",
    )


def _answer(stack: TrainingStack, run_id: str) -> dict[str, Any] | None:
    answer = stack.client.get(f"/v1/runs/{run_id}")
    return answer.json() if answer.status_code == 200 else None
