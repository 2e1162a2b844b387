"""Reference answers: rows whose answer no reward could compare with are named before training."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from anneal.contracts.rewards import Reward
from worker.training.data.answers import answer_problem, item_problem


def reward(**fields: Any) -> Reward:
    configured: Reward = TypeAdapter(Reward).validate_python(fields)
    return configured


@pytest.mark.parametrize("answer", ["", "seven", "1e999", "x = ?"])
def test_an_answer_without_a_number_is_named_where_numbers_are_compared(answer: str) -> None:
    compares = [reward(type="length", max=3), reward(type="numeric_match")]
    assert "does not contain a number" in (answer_problem(compares, answer) or "")
    assert answer_problem([reward(type="exact_match")], answer) is None
    assert answer_problem([reward(type="length", max=3)], answer) is None
    assert answer_problem(compares, "so #### 1,042") is None


def test_no_answer_is_bad_where_one_is_needed() -> None:
    for kind in ("exact_match", "numeric_match"):
        assert "no `answer`" in (answer_problem([reward(type=kind)], None) or "")
    assert answer_problem([reward(type="length", max=3)], None) is None


def test_row_without_a_value_that_a_reward_refers_to_is_named_with_its_path() -> None:
    compares = [reward(type="length", max=3), reward(type="string_check", reference="{{ item.facts.unit }}")]
    for item in ({}, {"facts": None}, {"facts": {"unit": None}}):
        assert item_problem(compares, item) == "it has no value for `{{ item.facts.unit }}`, to which a reward refers"
    assert item_problem(compares, {"facts": {"unit": 0}}) is item_problem([], {}) is None
