"""Templates of rewards: what they refer to, and the text that a row and a completion make of them."""

import time
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from anneal.contracts.reward_texts.templates import (
    MissingValue,
    Template,
    missing_path,
    render_template,
    row_item,
    template_columns,
)

ITEM: dict[str, Any] = {"answer": "4", "facts": {"unit": "kg", "values": [1.5, {"n": 2}]}, "none": None, "größe": True}
TEMPLATE: TypeAdapter[str] = TypeAdapter(Template)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ item.answer }}", "4"), ("{{item.answer}}{{item.answer}}", "44"), ("no {braces} }}", "no {braces} }}"),
        ("{{ sample.output_text }}!", '{"n": [7]}!'), ("{{ sample.output_json.n.0 }}", "7"),
        ("{{ sample.output_json }}", '{"n": [7]}'), ("{{ item.facts.unit }}", "kg"),
        ("{{ item.facts.values }}", '[1.5, {"n": 2}]'), ("{{ item.facts.values.1.n }}", "2"),
        ("{{ item.größe }}", "true"),
    ],
)  # fmt: skip
def test_references_are_replaced_by_values_of_the_row_and_the_completion(template: str, text: str) -> None:
    assert TEMPLATE.validate_python(template) == template
    assert render_template(template, ITEM, '{"n": [7]}') == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ item.other }}", "{{ item.none }}", "{{ item.answer.0 }}", "{{ item.facts.values.2 }}",
        "{{ item.facts.values.٠ }}", "{{ sample.output_json.m }}", "{{ sample.output_json.n.-1 }}",
    ],
)  # fmt: skip
def test_reference_without_a_value_is_an_error(template: str) -> None:
    with pytest.raises(MissingValue):
        render_template(template, ITEM, '{"n": [7]}')


@pytest.mark.parametrize("completion", ["", "n: 7", "[" * 100_000])
def test_completion_that_is_not_json_has_no_members(completion: str) -> None:
    with pytest.raises(MissingValue):
        render_template("{{ sample.output_json.n }}", {}, completion)


@pytest.mark.parametrize(
    "template", ["{{ answer }}", "{{ item }}", "{{ sample.output_tools }}", "{{ item['a'] }}", "{{", "{{ item.a }", ""]
)
def test_reference_to_anything_else_is_refused(template: str) -> None:
    with pytest.raises(ValidationError):
        TEMPLATE.validate_python(template)


def test_columns_are_those_of_the_row_and_a_prompt_has_them_as_messages() -> None:
    templates = ["{{ item.a.b }} {{ sample.output_text }}", "{{ item.messages }} {{item.a}}"]
    assert [*template_columns(templates)] == ["a", "messages", "a"]
    assert row_item({"prompt": "why", "a": {"b": 1}, "c": 2}, ["a", "messages", "d"]) == {
        "a": {"b": 1}, "messages": "why", "d": None,
    }  # fmt: skip
    assert missing_path(templates, {"a": {}, "messages": "why"}) == "item.a.b"
    assert missing_path(templates, {"a": {"b": 0}, "messages": "why"}) is None


def test_template_of_many_braces_is_read_in_linear_time() -> None:
    began = time.thread_time()
    for text in ("{" * 20_000, "{{ " * 6_000, "{{}" * 6_000):
        with pytest.raises(ValidationError):
            TEMPLATE.validate_python(text)
    assert time.thread_time() - began < 0.5
