"""Answers through the whole service: of bases and adapters, beside training, and after processes are killed."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from playwright.sync_api import Browser, expect
from typer.testing import CliRunner

from anneal.client.client import Anneal
from app.cli.main import cli
from app.infra.terminal_text import plain_text
from tests.browser import sign_in, window
from tests.e2e.conftest import TrainingStack
from tests.nodes import ROOT
from tests.openai.conftest import client_of
from tests.stack import pids_of_trainers
from tests.waiting import eventually

LONG = 200
QUESTION: Any = [{"role": "user", "content": "what is row 7"}]


@pytest.fixture
def client(stack: TrainingStack, ends: None) -> Iterator[openai.OpenAI]:
    with client_of(stack.api, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def adapter(stack: TrainingStack) -> str:
    """A run whose output is an adapter."""
    run_id = stack.train(method="lora", max_steps=2, save_steps=1)
    shown = stack.until(run_id, "completed", "failed", timeout=120)
    assert shown["status"] == "completed", shown["error_message"]
    return run_id


def ask(client: openai.OpenAI, model: str = "tiny", **options: Any) -> Any:
    return client.chat.completions.create(model=model, messages=QUESTION, temperature=0, **options)


def text_of(client: openai.OpenAI, model: str = "tiny", **options: Any) -> str:
    text = ask(client, model, **{"max_tokens": 12, **options}).choices[0].message.content
    assert isinstance(text, str)
    return text


def serving_runs(stack: TrainingStack, *statuses: str) -> list[dict[str, Any]]:
    query = {"task": "serve", **({"status": statuses} if statuses else {})}
    runs: list[dict[str, Any]] = stack.client.get("/v1/runs", params=query).json()["data"]
    return runs


def serving_run(stack: TrainingStack) -> dict[str, Any]:
    """The run that serves, whose first answers come before its status is recorded."""
    (run,) = eventually(lambda: serving_runs(stack, "running"))
    return run


def test_base_and_adapter_answer_from_one_serving_run_which_makes_room_for_training(
    stack: TrainingStack, client: openai.OpenAI, adapter: str
) -> None:
    base, own = text_of(client), text_of(client, adapter)
    assert base and own
    streamed = list(ask(client, adapter, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == own
    assert streamed[-1].usage.completion_tokens == 12 and streamed[-1].usage.prompt_tokens > 0
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: text_of(client, adapter), range(8))) == [own] * 8
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 4000}])
    assert raised.value.code == "context_length_exceeded"
    run = serving_run(stack)
    training = stack.train(method="lora", max_steps=1)
    assert stack.until(training, "completed", "failed", timeout=120)["status"] == "completed"
    ended = stack.until(run["id"], "completed", "failed", "cancelled", timeout=30)
    assert (ended["status"], ended["fine_tuned_model"]) == ("completed", None)
    reasons = [event["reason"] for event in stack.events(run["id"]) if event["type"] == "status"]
    assert reasons[-1] == f"made room for run {training}, which waits"


def test_process_that_is_killed_in_mid_answer_costs_that_answer_alone(
    stack: TrainingStack, client: openai.OpenAI
) -> None:
    before = text_of(client)
    run = serving_run(stack)
    pid = pids_of_trainers(stack.journal(run["id"]))[-1]
    stream = ask(client, max_tokens=LONG, n=8, stream=True)
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="was lost before its end"):
        list(stream)
    assert text_of(client) == before
    assert serving_run(stack)["id"] == run["id"]
    assert stack.stop(run["id"]).status_code == 202
    assert stack.until(run["id"], "cancelled", "completed", "failed", timeout=30)["status"] == "cancelled"


@pytest.mark.full
def test_adapter_that_takes_no_others_beside_it_answers_from_a_run_of_its_own(
    stack: TrainingStack, client: openai.OpenAI
) -> None:
    run_id = stack.train(method="lora", max_steps=2, save_steps=1, trainable_token_indices=[3])
    assert stack.until(run_id, "completed", "failed", timeout=120)["status"] == "completed"
    output = text_of(client, run_id)
    run = serving_run(stack)
    assert run["base_run_id"] == run_id
    saved = stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
    last = max(saved, key=lambda checkpoint: checkpoint["step"])
    stack.client.post(f"/v1/runs/{run['id']}/stop").raise_for_status()
    assert text_of(client, last["id"]) == output
    run = serving_run(stack)
    stack.client.post(f"/v1/runs/{run['id']}/stop").raise_for_status()


@pytest.mark.full
def test_models_of_different_weights_answer_by_turns_on_one_device(
    stack: TrainingStack, client: openai.OpenAI, adapter: str
) -> None:
    quantized = stack.train(method="qlora", max_steps=1)
    assert stack.until(quantized, "completed", "failed", timeout=120)["status"] == "completed"
    before = text_of(client, adapter)
    assert text_of(client, quantized)
    assert text_of(client, adapter) == before


@pytest.mark.full
def test_worker_api_and_valkey_that_are_killed_in_mid_answer_end_it_within_seconds_and_the_next_one_comes(
    stack: TrainingStack, client: openai.OpenAI
) -> None:
    before = text_of(client)

    def interrupted(kill: Any) -> None:
        stream = ask(client, max_tokens=LONG, n=8, stream=True)
        next(stream)
        kill()
        with pytest.raises((openai.APIError, httpx.TransportError)):
            list(stream)
        eventually(lambda: answers_again(client, before), timeout=90)

    interrupted(stack.kill_valkey)
    interrupted(lambda: restart_worker(stack))
    interrupted(lambda: restart_api(stack))


def answers_again(client: openai.OpenAI, text: str) -> bool:
    try:
        return text_of(client) == text
    except openai.APIError:
        return False


def restart_worker(stack: TrainingStack) -> None:
    stack.workers[-1].kill()
    stack.add_worker(slots=1)


def restart_api(stack: TrainingStack) -> None:
    stack.api.kill()  # type: ignore[attr-defined]
    stack.api.start()
    stack.api.wait_until_up()


def test_programs_of_the_guide_print_answers(
    stack: TrainingStack, ends: None, adapter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "guides" / "answers.md").read_text()
    with_openai, with_client = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    connections = {"http://127.0.0.1:8700": stack.api.url, '"…"': repr(stack.api.key)}
    own = {"Anneal()": f"Anneal({stack.api.url!r}, {stack.api.key!r})"}
    for program, replacements in ((with_openai, connections), (with_client, own)):
        for shown, real in {**replacements, "run_…": adapter}.items():
            assert shown in program
            program = program.replace(shown, real)
        exec(compile(program, "answers.md", "exec"), {})
        first, _, streamed = capsys.readouterr().out.partition("\n")
        assert first or streamed


@pytest.mark.full
def test_command_and_client_print_what_openais_client_gets(
    stack: TrainingStack, client: openai.OpenAI, adapter: str, tmp_path: Path
) -> None:
    expected = text_of(client, adapter)
    with Anneal(stack.api.url, stack.api.key) as own:
        assert own.chat(adapter, QUESTION, temperature=0, max_tokens=12).text == expected
    environment = {"ANNEAL_URL": stack.api.url, "ANNEAL_API_KEY": stack.api.key, "ANNEAL_HOME": str(tmp_path)}
    options = ["--temperature", "0", "--max-tokens", "12"]
    done = CliRunner().invoke(cli, ["chat", adapter, *options], env=environment, input=QUESTION[0]["content"])
    assert done.stdout == f"{plain_text(expected)}\n", done.output


@pytest.mark.full
def test_page_streams_what_openais_client_gets(
    stack: TrainingStack, client: openai.OpenAI, adapter: str, chromium: Browser
) -> None:
    expected = text_of(client, adapter)
    with window(chromium, stack.api.url) as context:
        page = sign_in(context, stack.client)
        page.goto(f"/runs/{adapter}")
        page.locator(".head").get_by_role("link", name="Try it").click()
        expect(page.get_by_role("log")).to_have_count(2)  # the models of the run are chosen
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Maximum number of tokens").fill("12")
        page.get_by_label("Question").fill(QUESTION[0]["content"])
        page.keyboard.press("Enter")
        output, base = (page.get_by_role("log").nth(number).locator(".bubble") for number in range(2))
        expect(output.nth(1)).to_have_text(expected)
        expect(base.nth(1)).to_have_text(text_of(client))
