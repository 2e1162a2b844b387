"""Reference answers of rows, with which rewards compare completions.

Does not import torch.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anneal.contracts.reward_texts.templates import missing_path
from anneal.contracts.rewards import NumericMatchReward, Reward, needs_answer, templates_of

_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\N{MINUS SIGN}])?[$€£]?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"(?:[eE][-+]?[0-9]+)?|\.[0-9]+)"
)


def answer_problem(rewards: Sequence[Reward], answer: str | None) -> str | None:
    """Return why completions cannot be compared with the `answer` of a row; None if they can or need not be."""
    if not needs_answer(rewards):
        return None
    if not isinstance(answer, str):
        return "it has no `answer`, but a reward compares with it"
    if last_number(answer) is None and any(isinstance(reward, NumericMatchReward) for reward in rewards):
        return (
            f"its `answer` {answer[:100]!r} does not contain a number, but the reward `numeric_match` compares with one"
        )
    return None


def item_problem(rewards: Sequence[Reward], item: Mapping[str, Any]) -> str | None:
    """Return why templates of rewards cannot be filled in for a row; None if they can, or there are none."""
    path = missing_path((template for reward in rewards for template in templates_of(reward)), item)
    return None if path is None else f"it has no value for `{{{{ {path} }}}}`, to which a reward refers"


def last_number(text: str) -> float | None:
    """Return the last number in a text, such as `1,234.5`, `-$3` or `2e5`; None if there is none that is finite."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    number = float(last[1].replace(",", ""))
    if not math.isfinite(number):
        return None
    return -number if last[0][0] in "-\N{MINUS SIGN}" else number
