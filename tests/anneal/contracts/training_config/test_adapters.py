"""Fields of an adapter that cannot be right together are refused with a sentence."""

from typing import Any

import pytest

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import sharding_obstacles
from anneal.contracts.training_config.validation import config_errors


def errors(**fields: Any) -> dict[str, str]:
    problems = config_errors({"base_model": "tiny", **fields}, has_eval_dataset=False)
    assert all(error.code == "conflict" for error in problems)
    return {error.field: error.message for error in problems}


PISSA = {"init_lora_weights": "pissa"}
LOFTQ = {"init_lora_weights": "loftq"}


@pytest.mark.parametrize(
    ("fields", "field", "sentence"),
    [
        ({"method": "qlora", **PISSA}, "init_lora_weights", "cannot be done exactly in 4 bits; use method `lora`"),
        ({"method": "sft", **PISSA}, "init_lora_weights", "set `load_in_4bit` to false"),
        ({"method": "qlora", "load_in_8bit": True, "init_lora_weights": "olora"}, "init_lora_weights", "in 8 bits"),
        (
            {"method": "dpo", "load_in_4bit": False, **PISSA},
            "init_lora_weights",
            "method `dpo` compares the model with",
        ),
        ({"method": "lora", "use_dora": True, **PISSA}, "init_lora_weights", "`use_dora`"),
        ({"method": "lora", "target_modules": ["wte"], **PISSA}, "init_lora_weights", "contains `wte`"),
        ({"method": "lora", **LOFTQ}, "init_lora_weights", "use method `qlora`"),
        ({"method": "qlora", "load_in_8bit": True, **LOFTQ}, "init_lora_weights", "use method `qlora`"),
        ({"method": "lora", "lora_r": 7, "init_lora_weights": "orthogonal"}, "init_lora_weights", "even `lora_r`"),
        ({"method": "full", **PISSA}, "init_lora_weights", "only to adapters"),
        ({"method": "full", "layers_to_transform": [1]}, "layers_to_transform", "only to adapters"),
        (
            {"method": "lora", "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["q_proj"]},
            "modules_to_save",
            "contains `q_proj`, which `target_modules` contains too",
        ),
        ({"method": "lora", "layers_to_transform": [1, 2, 1]}, "layers_to_transform", "contains 1 twice"),
        (
            {"method": "lora", "trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]},
            "trainable_token_indices",
            "`modules_to_save` contains `embed_tokens`",
        ),
    ],
)
def test_impossible_adapter_fields_are_refused(fields: dict[str, Any], field: str, sentence: str) -> None:
    assert sentence in errors(**fields)[field]


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "lora", **PISSA}, {"method": "sft", "load_in_4bit": False, "init_lora_weights": "olora"},
        {"method": "qlora", **LOFTQ}, {"method": "dpo", "init_lora_weights": "gaussian"}, {"method": "dpo", **LOFTQ},
        {"method": "lora", "init_lora_weights": "orthogonal", "use_dora": True},
        {"method": "reward", "load_in_4bit": False, **PISSA},
        {"method": "full", "init_lora_weights": "default"},
        {"method": "lora", "layers_to_transform": [0, 1], "trainable_token_indices": [3], "target_modules": ["q_proj"]},
    ],
    ids=str,
)  # fmt: skip
def test_valid_adapter_fields_are_accepted(fields: dict[str, Any]) -> None:
    assert errors(**fields) == {}


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("init_lora_weights", "eva", "unknown_value"), ("init_lora_weights", True, "unknown_value"),
        ("layers_to_transform", [], "out_of_range"), ("layers_to_transform", [-1], "out_of_range"),
        ("trainable_token_indices", ["a"], "wrong_type"), ("trainable_token_indices", 5, "wrong_type"),
        ("tokenizer", "../other", "invalid_name"), ("tokenizer", {"type": "mine"}, "wrong_type"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(field: str, value: Any, code: str) -> None:
    (error,) = config_errors({"base_model": "tiny", field: value}, has_eval_dataset=False)
    assert (error.field.split(".")[0], error.code) == (field, code)


@pytest.mark.parametrize("fields", [PISSA, {"trainable_token_indices": [1]}], ids=str)
def test_an_adapter_that_needs_the_whole_model_cannot_be_divided(fields: dict[str, Any]) -> None:
    config = TrainingConfig.model_validate({"base_model": "tiny", "method": "lora", **fields})
    assert any(next(iter(fields)) in obstacle for obstacle in sharding_obstacles(config, {*fields}))
