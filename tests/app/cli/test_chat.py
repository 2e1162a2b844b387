"""`anneal chat`: one question of a script, and a conversation on a terminal."""

import os
import re
import select
import shlex
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import Engine

from app.infra.storage import Storage
from app.openai import questions
from tests.conftest import Anneal, json_of
from tests.factories import Trainer, make_dataset, make_model, make_run
from tests.nodes import ROOT
from tests.openai.serving import prepare_models, serving, serving_runs, trained
from tests.server import ApiServer
from tests.waiting import eventually


@pytest.fixture
def api(emptied_api: ApiServer, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    """A service with a worker and the base model `tiny`."""
    monkeypatch.setattr(questions, "_WATCH_SECONDS", 0.1)
    monkeypatch.setattr(questions, "KEEP_ALIVE_SECONDS", 0.05)
    prepare_models(emptied_api, engine)
    return emptied_api


@contextmanager
def answers(api: ApiServer, engine: Engine, *texts: tuple[str, ...], end: str = "stop") -> Iterator["Future[Any]"]:
    """Answer as many questions with these pieces; provides the future questions."""

    def write_answers() -> list[Any]:
        received = []
        with serving(api, engine) as process:
            for pieces in texts:
                question = process.next_question()
                process.write(question, *pieces, end=end)
                received.append(question)
        return received

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(write_answers)


def test_question_of_a_script_is_an_option_or_standard_input_and_its_answer_is_printed(
    api: ApiServer, engine: Engine, anneal: Anneal
) -> None:
    with answers(api, engine, ("Hel", "lo\n\x1b[2J", "you"), ("again",), ("{}",), end="length") as received:
        piped = anneal("chat", "tiny", "--system", "Be brief.", "--max-tokens", "4", input="hello\n")
        option = anneal("chat", "tiny", "--prompt", "hi", input="not read")
        whole = json_of(anneal("chat", "tiny", "-p", "hi", "--json"))
    assert piped.stdout == "Hello\nyou\n" and "raise --max-tokens" in piped.stderr
    assert option.stdout == "again\n"
    assert (whole["object"], whole["choices"][0]["message"]["content"]) == ("chat.completion", "{}")
    hi = [{"role": "user", "content": "hi"}]
    system = {"role": "system", "content": "Be brief."}
    sent = [(question["messages"], question.get("max_tokens")) for question in received.result(30)]
    assert sent == [([system, {"role": "user", "content": "hello"}], 4), (hi, None), (hi, None)]
    listed = json_of(anneal("runs", "list", "--task", "serve", "--json"))["data"]
    assert [run["id"] for run in listed] == [run.id for run in serving_runs(engine)]


def test_last_is_the_newest_training_and_no_run_that_a_question_has_created(
    api: ApiServer, engine: Engine, anneal: Anneal
) -> None:
    config = {"base_model": "tiny", "method": "lora", "lora_r": 8, "learning_rate": 1e-3}
    run_id, checkpoint_id = trained(api, engine, config, "docstrings")
    with answers(api, engine, ("first",), ("second",)) as received:
        anneal("chat", "last", "-p", "hi")
        anneal("chat", "last", "-p", "hi", "--checkpoint", "last")
    assert [question["adapter"] for question in received.result(30)] == [run_id, checkpoint_id]
    assert len(serving_runs(engine)) == 1
    assert json_of(anneal("runs", "show", "last", "--json"))["id"] == run_id


def test_question_that_cannot_be_answered_ends_with_a_sentence(api: ApiServer, engine: Engine, anneal: Anneal) -> None:
    unknown = anneal("chat", "../tiny", "-p", "hi", code=1)
    assert "`anneal models list`" in unknown.stderr and "/openai" not in unknown.stderr
    assert "add --prompt" in anneal("chat", "tiny", input=" \n", code=1).stderr
    assert "not text in UTF-8" in anneal("chat", "tiny", input=b"\xff", code=1).stderr
    run_id = make_run(api.client, make_dataset(engine))["id"]
    assert "has no checkpoint yet" in anneal("chat", run_id, "--checkpoint", "last", code=1).stderr
    assert serving_runs(engine) == []


class Terminal:
    """Other end of the terminal of a command."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._text = bytearray()

    def type_line(self, text: str) -> None:
        """Type a line; what was on the terminal before is forgotten."""
        self._text.clear()
        os.write(self._descriptor, f"{text}\n".encode())

    def shows(self, text: str) -> bool:
        """Return True once the terminal has shown a text."""
        if select.select([self._descriptor], [], [], 0)[0]:
            with suppress(OSError):  # the other end is closed
                self._text.extend(os.read(self._descriptor, 65536))
        return text in self._text.decode(errors="replace")

    def end_input(self) -> None:
        """Type Ctrl-D."""
        os.write(self._descriptor, b"\x04")


def test_conversation_goes_on_after_an_answer_that_was_stopped_and_one_that_failed_until_it_is_reset(
    api: ApiServer, engine: Engine, start: Any
) -> None:
    command, descriptor = start("chat", "tiny", "--system", "Be brief.")
    terminal = Terminal(descriptor)
    eventually(lambda: terminal.shows("> "))
    terminal.type_line("first")
    eventually(lambda: terminal.shows("is pending: It waits for its turn."))
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "first"}
    with serving(api, engine) as process:
        question = process.next_question()
        assert question["messages"] == [system, first]
        process.write(question, "partial", end=None)
        eventually(lambda: terminal.shows("partial"))
        command.send_signal(signal.SIGINT)
        assert process.next_cancelled() == question["id"]
        eventually(lambda: terminal.shows("The answer was stopped."))

        terminal.type_line("refused")
        process.fail(process.next_question(), "context_length_exceeded", "The chat is too long: shorten it.")
        eventually(lambda: terminal.shows("The chat is too long: shorten it."))

        terminal.type_line("second")
        question = process.next_question()
        remembered = [system, first, {"role": "assistant", "content": "partial"}, {"role": "user", "content": "second"}]
        assert question["messages"] == remembered
        process.write(question, "Hel", "lo")
        eventually(lambda: terminal.shows("Hello"))

        terminal.type_line("/reset")
        eventually(lambda: terminal.shows("starts over"))
        terminal.type_line("third")
        question = process.next_question()
        assert question["messages"] == [system, {"role": "user", "content": "third"}]
        process.write(question, "done")
        eventually(lambda: terminal.shows("done"))
        terminal.end_input()
        assert command.wait(30) == 0


def test_commands_of_the_guide_ask_as_it_says(api: ApiServer, engine: Engine, anneal: Anneal) -> None:
    make_model(api.settings, "Qwen/Qwen3-0.6B")
    config = {"base_model": "Qwen/Qwen3-0.6B", "method": "lora", "lora_r": 8}
    run = make_run(api.client, make_dataset(engine), name="docstrings", backend="celery", config=config)
    Trainer(engine, run["id"]).begin().complete().write_output(Storage(api.settings))
    guide = (ROOT / "docs" / "guides" / "answers.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    (lines,) = [block.splitlines() for block in blocks if "anneal chat" in block]
    with answers(api, engine, *[("yes",)] * len(lines)) as received:
        for line in lines:
            command = line.partition("#")[0].partition("<")[0]
            assert anneal(*shlex.split(command)[1:], input="a report").stdout == "yes\n"
    messages = [[(it["role"], it["content"]) for it in question["messages"]] for question in received.result(30)]
    assert messages == [
        [("user", "a report")],
        [("user", "What does annealing do?")],
        [("system", "Summarize the text in one sentence."), ("user", "a report")],
    ]
