"""Tool calls of an answer are recognized as its model writes them, and the rest of it is text."""

import json
from pathlib import Path
from typing import Any

import pytest
from trl.chat_template_utils import qwen3_chat_template

from anneal.contracts.attempt.answers import ToolCall
from tests.worker.training.serving.asking import ask, load_tokenizer, new_question, scripted_model
from worker.training.serving.engine import AnswerEngine
from worker.training.serving.tool_calls import ToolCallStream, response_template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CHAT = [{"role": "user", "content": "what"}]
HERMES = "{{ tools }}{% for message in messages %}{{ message['content'] }}{% endfor %} Call with <tool_call>."
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "Örebro", "days": 3}}\n</tool_call>'
LOOK = ToolCall(name="look", arguments='{"place": "Örebro", "days": 3}')


@pytest.fixture(params=["known", "similar"])
def tokenizer(request: pytest.FixtureRequest, tiny_model: Path) -> Any:
    """A tokenizer with a template that TRL knows, and with one that has calls of the same form."""
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = qwen3_chat_template if request.param == "known" else HERMES
    return tokenizer


def parse_answer(tokenizer: Any, text: str) -> tuple[str, list[ToolCall], list[str]]:
    """Return the text of an answer, its calls, and the pieces in which the text came."""
    template = response_template(tokenizer)
    assert template is not None
    stream = ToolCallStream(tokenizer, new_question(1, messages=CHAT, tools=TOOLS), [5], template)
    pieces = [stream.add(token) for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    pieces.append(stream.finish())
    return "".join(pieces), stream.tool_calls, pieces


def test_calls_are_taken_out_of_the_text_before_them(tokenizer: Any) -> None:
    text, calls, pieces = parse_answer(tokenizer, f"It saw two. {CALL}\n{CALL}")
    assert text.strip() == "It saw two." and calls == [LOOK, LOOK]
    assert len([piece for piece in pieces if piece]) > 3, "the text before a call is sent as it comes"


@pytest.mark.parametrize("text", ["a < b and <tool", "<think>\nhm\n</think>\n\nit", "it is {}", ""])
def test_answer_without_a_call_is_text_as_the_model_writes_it(text: str, tokenizer: Any) -> None:
    assert parse_answer(tokenizer, text)[:2] == (text, [])


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>\nlook(3)\n</tool_call>",
        '<tool_call>\n{"name": "look", "argu',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": "there"}\n</tool_call>',
    ],
)
def test_call_that_cannot_be_read_is_text(call: str, tokenizer: Any) -> None:
    text, calls, _ = parse_answer(tokenizer, f"Well: {call}")
    assert text.rstrip() == f"Well: {call}" and calls == []


@pytest.mark.parametrize("bad", ["<tool_call>\nlook(3)\n</tool_call>", '<tool_call>\n{"name": "look", "argu'])
def test_text_between_a_call_and_one_that_cannot_be_read_comes_once(bad: str, tokenizer: Any) -> None:
    answer = f"A<tool_call {CALL}B{bad}"
    text, calls, _ = parse_answer(tokenizer, answer)
    assert text == answer and calls == []
    assert parse_answer(tokenizer, f"A {CALL}B {CALL} C")[:2] == ("A B C", [LOOK, LOOK])


def test_template_without_a_known_form_has_no_calls(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    assert response_template(tokenizer) is None


def test_answer_with_a_call_ends_with_it(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = HERMES
    answer = f"Well. {CALL}"
    rendered = tokenizer.apply_chat_template(CHAT, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    start = len(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    model = scripted_model(tokenizer, start, answer)
    options = {"messages": CHAT, "max_tokens": None}
    answers = ask(AnswerEngine(model, tokenizer), [new_question(1, tools=TOOLS, **options)])
    last = answers.pieces["1"][-1]
    assert (last.finish_reason, last.tool_calls) == ("tool_calls", [LOOK])
    assert answers.text(1).strip() == "Well."
    assert json.loads(last.tool_calls[0].arguments) == {"place": "Örebro", "days": 3}
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    without = ask(AnswerEngine(model, tokenizer), [new_question(2, ids, max_tokens=None)])
    assert without.text(2) == answer and without.pieces["2"][-1].finish_reason == "stop"
