"""Values far outside the usual range of their method are warned about, and usual ones never are."""

from typing import Any

import pytest

from anneal.contracts.methods import METHODS, TrainingMethod
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.usual_ranges import unusual_values


def warned(**fields: Any) -> dict[str, str]:
    config = TrainingConfig.model_validate({"base_model": "tiny", **fields})
    return {warning.field: warning.message for warning in unusual_values(config)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [16, None])
def test_defaults_of_no_method_are_warned_about(method: TrainingMethod, rank: int | None) -> None:
    assert warned(method=method, lora_r=rank) == {}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"method": "dpo", "learning_rate": 2e-4}, "0.0002, 40 times the default of method `dpo` with an adapter"),
        ({"method": "rlhf", "learning_rate": 2e-4}, "20 times the default of method `rlhf` with an adapter, 1e-05"),
        ({"method": "dpo", "lora_r": None, "learning_rate": 2e-5}, "20 times the default of method `dpo` for all"),
        ({"method": "full", "learning_rate": 1e-3}, "50 times"),
        ({"method": "lora", "learning_rate": 1e-7}, "1/2,000 of the default"),
    ],
)
def test_a_learning_rate_of_another_method_is_compared_with_the_default(fields: Any, sentence: str) -> None:
    assert sentence in warned(**fields)["learning_rate"]


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "dpo", "learning_rate": 5e-5}, {"method": "full", "learning_rate": 2e-4},
        {"method": "lora", "learning_rate": 1e-3}, {"method": "full", "learning_rate": 0.1, "optim": "sgd"},
        {"lora_r": 256, "lora_alpha": 16},
        {"lora_r": 64, "lora_alpha": 128, "use_rslora": True}, {"dpo": {"beta": 50}},
        {"method": "full", "learning_rate": 1.0, "extra": {"optimizer": {"type": "mine"}}},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_people_use_are_not_warned_about(fields: Any) -> None:
    assert warned(**fields) == {}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"lora_dropout": 0.9}, "lora_dropout"), ({"weight_decay": 5}, "weight_decay"),
        ({"warmup_ratio": 0.9}, "warmup_ratio"), ({"neftune_noise_alpha": 500}, "neftune_noise_alpha"),
        ({"lora_r": 4, "lora_alpha": 4096}, "lora_alpha"), ({"method": "dpo", "dpo": {"beta": 50}}, "dpo.beta"),
        ({"method": "kto", "kto": {"beta": 50}}, "kto.beta"),
        ({"method": "rlhf", "rlhf": {"temperature": 50}}, "rlhf.temperature"),
    ],
)  # fmt: skip
def test_value_outside_its_usual_range_is_a_warning(fields: Any, name: str) -> None:
    assert list(warned(**fields)) == [name]
