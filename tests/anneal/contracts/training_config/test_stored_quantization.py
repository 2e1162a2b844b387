"""Which configurations fit a base model whose files are quantized."""

from typing import Any

import pytest

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import given_fields
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.stored_quantization import stored_quantization, stored_quantization_conflicts

FOUR_BIT = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_use_double_quant": False,
}  # fmt: skip
EIGHT_BIT = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
UNSUPPORTED = ("gptq", "awq", "fp8", "compressed-tensors", "torchao", "hqq", "aqlm", "brand-new")


def conflicts(described: Any, *, trains: bool = True, **config: Any) -> dict[str, str]:
    """Return the sentences about a configuration by field, for a base with this `quantization_config`."""
    stored = stored_quantization({"quantization_config": described})
    problems = stored_quantization_conflicts(stored, {"base_model": "tiny", **config}, trains=trains)
    assert all(problem.code == "conflict" and problem.message.startswith(f"`{problem.field}`") for problem in problems)
    return {problem.field: problem.message for problem in problems}


def effective(described: Any, **config: Any) -> tuple[TrainingConfig, set[str]]:
    """Return the configuration in effect, and the fields that were replaced."""
    stored = stored_quantization({"quantization_config": described})
    raw = {"base_model": "tiny", **config}
    resolved = resolve_config(TrainingConfig.model_validate(raw), given_fields(raw), None, stored=stored)
    assert resolved.problems == []
    return resolved.config, {item.field for item in resolved.replaced}


class TestReading:
    @pytest.mark.parametrize("described", [None, {}, 3, [], {"quant_method": "bitsandbytes"}])
    def test_unquantized_model_has_no_stored_quantization(self, described: Any) -> None:
        assert stored_quantization({"quantization_config": described}) is None

    def test_quantization_of_the_text_part_of_a_larger_model_counts(self) -> None:
        stored = stored_quantization({"text_config": {"quantization_config": FOUR_BIT}})
        assert stored is not None and (stored.bits, stored.quant_type) == (4, "fp4")
        assert stored_quantization({"text_config": 3}) is None


class TestConflicts:
    @pytest.mark.parametrize("name", UNSUPPORTED)
    @pytest.mark.parametrize("config", [{}, {"method": "full"}, {"method": "dpo"}, {"lora_r": None, "method": "sft"}])
    def test_quantization_methods_other_than_bitsandbytes_are_refused(self, name: str, config: dict[str, Any]) -> None:
        for trains in (True, False):
            (sentence,) = conflicts({"quant_method": name}, trains=trains, **config).values()
            assert f"`{name}`" in sentence and "name the model" in sentence
        assert set(conflicts({"bits": 4}, **config)) == {"base_model"}

    @pytest.mark.parametrize(
        ("described", "config", "field"),
        [
            (FOUR_BIT, {"method": "full"}, "method"),
            (FOUR_BIT, {"method": "lora"}, "method"),
            (FOUR_BIT, {"method": "sft", "lora_r": None}, "lora_r"),
            (FOUR_BIT, {"method": "qlora", "load_in_8bit": True}, "load_in_8bit"),
            (FOUR_BIT, {"method": "dpo", "load_in_4bit": False}, "load_in_4bit"),
            (FOUR_BIT | {"bnb_4bit_quant_type": "nf4"}, {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
            (FOUR_BIT | {"bnb_4bit_use_double_quant": True}, {"extra": {"double_quant": False}}, "extra.double_quant"),
            (EIGHT_BIT, {"method": "lora"}, "method"),
            (EIGHT_BIT, {"method": "dpo", "load_in_4bit": False}, "load_in_4bit"),
            (EIGHT_BIT, {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
            (FOUR_BIT, {"method": "qlora", "init_lora_weights": "loftq"}, "init_lora_weights"),
            (EIGHT_BIT, {"method": "sft", "init_lora_weights": "loftq"}, "init_lora_weights"),
            ({"quant_method": "mxfp4"}, {"method": "sft", "init_lora_weights": "loftq"}, "init_lora_weights"),
        ],
    )
    def test_settings_that_the_files_contradict_are_refused(
        self, described: dict[str, Any], config: dict[str, Any], field: str
    ) -> None:
        assert set(conflicts(described, **config)) == {field}

    @pytest.mark.parametrize(
        ("config", "fields"),
        [
            ({"method": "qlora"}, {"method"}),
            ({"method": "sft", "load_in_8bit": True}, {"load_in_8bit"}),
            ({"method": "full"}, set()),
            ({"method": "lora"}, set()),
            ({"method": "sft"}, set()),
            ({"method": "dpo", "lora_r": None}, set()),
        ],
    )
    def test_weights_that_are_dequantized_when_loaded_are_not_quantized_again(
        self, config: dict[str, Any], fields: set[str]
    ) -> None:
        assert set(conflicts({"quant_method": "mxfp4"}, **config)) == fields

    @pytest.mark.parametrize("method", ["full", "lora"])
    def test_evaluations_take_a_quantized_base(self, method: str) -> None:
        assert conflicts(FOUR_BIT, trains=False, method=method) == {}

    @pytest.mark.parametrize("described", [FOUR_BIT, EIGHT_BIT])
    @pytest.mark.parametrize("method", ["qlora", "sft", "dpo", "kto", "reward"])
    def test_defaults_fit(self, described: dict[str, Any], method: str) -> None:
        assert conflicts(described, method=method) == {}


class TestEffectiveConfiguration:
    def test_effective_quantization_is_that_of_the_files(self) -> None:
        config, replaced = effective(FOUR_BIT, method="qlora")
        assert (config.load_in_4bit, config.load_in_8bit, config.bnb_4bit_quant_type) == (True, False, "fp4")
        assert config.trainer_options.double_quant is False and replaced == {"bnb_4bit_quant_type"}
        config, replaced = effective(EIGHT_BIT, method="sft")
        assert (config.load_in_4bit, config.load_in_8bit) == (False, True)
        assert replaced == {"load_in_4bit", "load_in_8bit"}

    def test_files_dequantized_on_load_are_not_quantized(self) -> None:
        config, replaced = effective({"quant_method": "mxfp4"}, method="sft")
        assert (config.load_in_4bit, config.load_in_8bit, replaced) == (False, False, {"load_in_4bit"})
        config, replaced = effective({"quant_method": "mxfp4"}, method="lora")
        assert (config.load_in_4bit, replaced) == (False, set())

    def test_config_without_adapter_or_quantized_base_is_unchanged(self) -> None:
        config, replaced = effective(FOUR_BIT, method="full")
        assert (config.load_in_4bit, replaced) == (False, set())
        config, replaced = effective(None, method="qlora")
        assert (config.load_in_4bit, config.bnb_4bit_quant_type, replaced) == (True, "nf4", set())
