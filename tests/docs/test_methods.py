"""Configurations in docs/guides/methods.md are valid; it covers all methods, and rewards.md all rewards."""

import json
import re
from pathlib import Path

import pytest

from anneal.contracts.methods import METHODS, RlhfOptions
from anneal.contracts.training_config.validation import config_errors

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
TEXT = (GUIDES / "methods.md").read_text()
CONFIGS = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["method"])
def test_configuration_is_valid(config: dict[str, object]) -> None:
    assert config_errors(config, has_eval_dataset=False) == []


def test_every_method_and_reward_is_described() -> None:
    for method in METHODS.values():
        formats = ", ".join(f"`{name}`" for name in method.formats)
        assert f"\n| `{method.name}` | {method.summary} | {formats} |" in TEXT
        assert method.options is None or f'"{method.name}": {{' in TEXT
    rewards = json.dumps(RlhfOptions.model_json_schema())
    kinds = set(re.findall(r'"const": "(\w+)"', rewards))
    assert len(kinds) == 12
    assert all(f"\n| `{kind}` |" in (GUIDES / "rewards.md").read_text() for kind in kinds), kinds
