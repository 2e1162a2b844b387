"""Promises about the answers of predictions on the page of a run, in a real browser."""

import json

from playwright.sync_api import Page, expect
from sqlalchemy import Engine

from app.infra.storage import Storage
from tests.app.web.pages import PHONE, too_wide
from tests.factories import Trainer, make_run, mark_run
from tests.server import ApiServer

ROWS = 25
LONG = "and the rows " * 2_000
"""Of some rows, so that a page of them is longer than one part of the file."""


def make_prediction(api: ApiServer, engine: Engine, dataset: str, name: str, score: float) -> str:
    """A prediction that has ended, whose answers name it; it could not answer row 3."""
    run_id: str = make_run(api.client, dataset, name=name)["id"]
    trainer = Trainer(engine, run_id).begin(total=ROWS)
    rows = [
        {
            "row": row, "prompt": [{"role": "user", "content": f"question ü {row}" + (LONG if row > 15 else "")}],
            "reference": f"reference {row}", "prediction": None if row == 2 else f"answer {row} of {name}",
            "finish_reason": "skipped" if row == 2 else "length", "problem": "it is too long" if row == 2 else None,
            "prompt_tokens": 3, "completion_tokens": 7,
            "scores": {} if row == 2 else {"exact_match": 0.0, "bleu": 12.5},
        }
        for row in range(ROWS)
    ]  # fmt: skip
    folder = trainer.write_output(Storage(api.settings))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "predictions.jsonl").write_text(text)
    mark_run(engine, run_id, task="predict", best_score=-score, total_steps=ROWS, current_step=ROWS)
    trainer.complete()
    return run_id


def test_answers_are_shown_row_by_row_beside_those_of_another_prediction(
    page: Page, shared_api: ApiServer, engine: Engine, dataset: str
) -> None:
    first = make_prediction(shared_api, engine, dataset, "first", 0.5)
    second = make_prediction(shared_api, engine, dataset, "second", 0.75)
    page.goto(f"/runs/{first}?tab=answers")
    rows = page.get_by_role("region", name="Answers").get_by_role("listitem")
    state = page.get_by_role("region", name="State of the run")
    expect(state).to_contain_text(f"Rows{ROWS} of {ROWS}")
    for word in ("loss", "Epoch", "Step"):
        expect(state).not_to_contain_text(word)
    expect(page.locator(".meta")).to_contain_text("prediction with")
    expect(rows).to_have_count(10)
    expect(rows.nth(0)).to_contain_text("question ü 0")
    expect(rows.nth(0)).to_contain_text("reference 0")
    expect(rows.nth(0)).to_contain_text("cut after 7 tokens · exact_match 0 · bleu 12.5")
    expect(rows.nth(2)).to_contain_text("No answer: it is too long")
    page.get_by_label("Compare with another prediction").select_option(second)
    expect(rows.nth(1)).to_contain_text("answer 1 of second")
    expect(rows.nth(1)).to_contain_text("answer 1 of first")
    for start in (10, 20):
        page.get_by_role("button", name="Next").click()
        expect(rows.nth(0)).to_contain_text(f"answer {start} of second")
    expect(rows).to_have_count(ROWS - 20)
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    page.get_by_role("button", name="Previous").click()
    expect(rows.nth(9)).to_contain_text("answer 19 of first")
    page.reload()
    expect(rows.nth(0)).to_contain_text("answer 0 of second")
    page.set_viewport_size(PHONE)
    assert too_wide(page) == []
    row = rows.nth(1).bounding_box()
    first_answer, second_answer = (
        rows.nth(1).get_by_text(f"answer 1 of {name}").bounding_box() for name in ("first", "second")
    )
    assert row and first_answer and second_answer
    assert first_answer["x"] == second_answer["x"] < row["x"] + 20, "answers start at the left edge, below each other"
    page.goto("/")
    page.get_by_role("group", name="Kind of runs").get_by_role("button", name="Predictions").click()
    expect(page.get_by_role("row").filter(has_text="second")).to_be_visible()
    shared_api.client.post("/v1/runs/delete", json={"ids": [first, second]})


def test_stopped_prediction_is_resumed_from_its_page(
    page: Page, shared_api: ApiServer, engine: Engine, dataset: str
) -> None:
    run_id = make_run(shared_api.client, dataset, name="stopped")["id"]
    trainer = Trainer(engine, run_id).begin(total=8)
    mark_run(engine, run_id, task="predict")
    page.goto(f"/runs/{run_id}?tab=answers")
    expect(page.get_by_text("No answers yet.")).to_be_visible()
    trainer.checkpoint(3)
    trainer.fail()
    page.get_by_role("button", name="Resume").click()
    page.wait_for_url(lambda url: "/runs/" in url and run_id not in url)
    expect(page.get_by_role("heading", name="stopped")).to_be_visible()
