"""Promises about the page on which models answer side by side, in a real browser."""

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from sqlalchemy import Engine, text

from app.openai import questions
from tests.app.web.pages import PHONE, too_wide, violations
from tests.openai.serving import Serving, prepare_models, serving, trained
from tests.server import ApiServer

LORA = {"base_model": "tiny", "method": "lora", "lora_r": 8, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def models(shared_api: ApiServer, engine: Engine) -> tuple[str, str]:
    """A run with an adapter on the base `tiny`, and its checkpoint of step 20."""
    prepare_models(shared_api, engine)
    return trained(shared_api, engine, LORA, "docstrings")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at runs more often than every second, and say sooner that a model is not ready."""
    monkeypatch.setattr(questions, "_WATCH_SECONDS", 0.1)
    monkeypatch.setattr(questions, "KEEP_ALIVE_SECONDS", 0.05)


def ask(page: Page, text: str) -> None:
    page.get_by_label("Question").fill(text)
    page.keyboard.press("Enter")


def column(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def next_questions(process: Serving, *adapters: str | None) -> list[dict[str, Any]]:
    """The next question to each of these, which come in any order."""
    by_adapter = {question.get("adapter"): question for question in (process.next_question() for _ in adapters)}
    return [by_adapter[adapter] for adapter in adapters]


def test_output_checkpoint_and_base_answer_side_by_side_until_they_end_are_stopped_or_the_page_is_left(
    page: Page, shared_api: ApiServer, engine: Engine, models: tuple[str, str]
) -> None:
    run_id, saved = models
    page.goto(f"/runs/{run_id}")
    page.locator(".head").get_by_role("link", name="Try it").click()
    output, checkpoint, base = (column(page, name) for name in ("docstrings", "Step 20", "tiny"))
    expect(base).to_be_visible()
    page.get_by_label("Add a model").select_option(saved)
    expect(checkpoint).to_contain_text("checkpoint of docstrings")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    ask(page, "What is <b>a</b> lease?")
    expect(output).to_contain_text("The serving run is pending: it waits for its turn.")
    with serving(shared_api, engine) as process:
        received = next_questions(process, run_id, saved, None)
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is <b>a</b> lease?"}]
        assert [(question["messages"], question["temperature"]) for question in received] == [(chat, 0.0)] * 3
        process.write(received[0], "<think>Short.</think>", "A loan ", end=None)
        expect(output).to_contain_text("A loan")
        expect(output).to_contain_text("Writing …")
        process.write(received[0], "of a row.")
        expect(output).to_contain_text("A loan of a row.")
        expect(output).to_contain_text("3 tokens")
        expect(output.get_by_text("Short.")).to_be_hidden()
        output.get_by_text("Reasoning").click()
        expect(output.get_by_text("Short.")).to_be_visible()
        process.write(received[1], "A l", end=None)
        process.fail(received[1], "out_of_memory", "The device is full: ask for less.")
        expect(checkpoint.get_by_role("alert")).to_have_text("The device is full: ask for less.")
        process.write(received[2], "", end="tool_calls", tool_calls=[{"name": "find", "arguments": '{"a": 1}'}])
        expect(base).to_contain_text('calls the tool find{"a": 1}')
        checkpoint.get_by_role("button", name="Ask again").click()
        process.write(process.next_question(), "Again.", end="length")
        expect(checkpoint).to_contain_text("1 token, cut at the maximum")
        assert violations(page) + too_wide(page) == []

        ask(page, "And a claim?")
        received = next_questions(process, run_id, saved, None)
        answer = {"role": "assistant", "content": "<think>Short.</think>A loan of a row."}
        assert received[0]["messages"] == [*chat, answer, {"role": "user", "content": "And a claim?"}]
        process.write(received[2], "partial", end=None)
        expect(base).to_contain_text("partial")
        page.get_by_role("button", name="Stop").click()
        assert {process.next_cancelled() for _ in received} == {question["id"] for question in received}
        expect(base).to_contain_text("Stopped.")
        expect(base).to_contain_text("partial")

        column(page, "Step 20").get_by_role("button", name="Remove Step 20").click()
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_text("And a claim?")).to_have_count(0)
        for adapters, link in (((run_id, None), "Try it"), ((None,), "Workers")):
            ask(page, "Last?")
            received = next_questions(process, *adapters)
            page.get_by_role("navigation", name="Pages").get_by_role("link", name=link).click()
            assert {process.next_cancelled() for _ in received} == {question["id"] for question in received}
            if link == "Try it":
                expect(output).to_have_count(0)
                page.get_by_label("Add a model").select_option("tiny")
        process.trainer.complete()


def test_refused_question_shows_its_reason_and_tools_that_are_not_json_are_not_sent(
    page: Page, engine: Engine, models: tuple[str, str], tolerated: list[str]
) -> None:
    tolerated.append("status of 503")
    with engine.begin() as connection:
        connection.execute(text("UPDATE workers SET state = 'offline'"))
    page.goto("/try")
    expect(page.get_by_text("No model is chosen.")).to_be_visible()
    page.get_by_label("Add a model").select_option("tiny")
    page.set_viewport_size(PHONE)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Tools").fill("[")
    page.get_by_label("Question").fill("What is a lease?")
    expect(page.get_by_role("alert")).to_contain_text("The tools are not JSON")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_disabled()
    page.get_by_label("Tools").fill("")
    page.get_by_role("button", name="Ask", exact=True).click()
    refused = column(page, "tiny")
    expect(refused.get_by_role("alert")).to_contain_text("No worker")
    expect(refused.get_by_role("button", name="Ask again")).to_be_visible()
    assert violations(page) + too_wide(page) == []
