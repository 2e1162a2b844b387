"""Every training method has a complete row, and raw configurations resolve to it."""

from typing import Any, get_args

import pytest

from anneal.contracts.field_types import DatasetFormat
from anneal.contracts.methods import (
    DEFAULT_METHOD,
    METHODS,
    OPTION_GROUPS,
    Method,
    RlhfOptions,
    TrainingMethod,
    method_of,
    options_of,
    rewards_of,
)
from anneal.contracts.training_config.fields import TrainingConfig
from app.datasets.formats import FORMATS

EACH = pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)


class TestMethods:
    def test_every_method_has_a_row(self) -> None:
        assert list(METHODS) == list(TrainingMethod)

    @EACH
    def test_method_names_only_existing_formats(self, method: Method) -> None:
        assert method.formats
        assert set(method.formats) <= set(get_args(DatasetFormat)) == set(FORMATS)

    @EACH
    def test_method_options_are_the_config_field_of_its_name(self, method: Method) -> None:
        field = TrainingConfig.model_fields.get(method.name)
        assert (field.annotation if field else None) is method.options
        assert OPTION_GROUPS.get(method.name) is method.options

    @EACH
    def test_method_generates_if_it_has_generation_options(self, method: Method) -> None:
        config = TrainingConfig(base_model="m", method=method.name)
        assert method.generates == (method.options is RlhfOptions)
        assert config.generation is (config.rlhf if method.generates else None)
        assert method.higher_is_better == method.generates

    @EACH
    def test_quantization_needs_an_adapter(self, method: Method) -> None:
        assert method.adapter != "forbidden" or method.quantization == "forbidden"
        assert method.adapter == "required" or method.quantization != "required"

    @EACH
    def test_a_smaller_method_has_the_same_objective_and_data(self, method: Method) -> None:
        if method.smaller is not None:
            smaller = METHODS[method.smaller]
            assert (smaller.objective, smaller.formats) == (method.objective, method.formats)


class TestMethodOf:
    @pytest.mark.parametrize("config", [{}, {"method": "unknown"}, {"method": None}, {"method": ["sft"]}], ids=str)
    def test_a_config_without_a_known_method_has_the_default_one(self, config: dict[str, Any]) -> None:
        assert method_of(config).name == DEFAULT_METHOD

    def test_the_default_is_that_of_the_field(self) -> None:
        assert TrainingConfig.model_fields["method"].default == DEFAULT_METHOD

    def test_options_are_those_of_the_method(self) -> None:
        assert options_of({"method": "dpo", "dpo": {"beta": 1}, "rlhf": {"beta": 2}}) == {"beta": 1}
        assert options_of({"method": "dpo", "dpo": 3}) == {}
        assert options_of({"method": "sft"}) == {}

    def test_rewards_come_with_their_field(self) -> None:
        rewards = [{"type": "length"}, "malformed", {"type": "regex"}]
        located = list(rewards_of({"method": "rlhf", "rlhf": {"rewards": rewards}}))
        assert located == [("rlhf.rewards.0", rewards[0]), ("rlhf.rewards.2", rewards[2])]
        assert list(rewards_of({"method": "dpo", "rlhf": {"rewards": rewards}})) == []
