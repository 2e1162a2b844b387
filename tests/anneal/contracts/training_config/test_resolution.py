"""What a training configuration resolves to on a machine."""

from typing import Any

import pytest

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from tests.anneal.contracts.training_config.configurations import CPU, GPU, OLD_GPU, effective


@pytest.mark.parametrize(
    ("fields", "four_bit", "rank"),
    [
        ({"method": "full"}, False, None),
        ({"method": "lora"}, False, 16),
        ({"method": "qlora"}, True, 16),
        ({"method": "qlora", "load_in_8bit": True}, False, 16),
        ({"method": "sft"}, True, 16),
        ({"method": "sft", "lora_r": None}, False, None),
        ({"method": "sft", "load_in_4bit": False}, False, 16),
    ],
)
def test_the_base_is_quantized_as_the_method_says(fields: dict[str, Any], four_bit: bool, rank: int | None) -> None:
    resolved = effective(**fields)
    assert (resolved.config.load_in_4bit, resolved.config.lora_r) == (four_bit, rank)
    assert resolved.problems == []


def test_defaults_that_a_cpu_cannot_honor_are_replaced_and_reported() -> None:
    resolved = effective(CPU)
    assert {r.field: (r.requested, r.used) for r in resolved.replaced} == {
        "gradient_checkpointing": ("auto", False),
        "bnb_4bit_compute_dtype": ("bfloat16", "float32"),
    }
    assert all(r.reason for r in resolved.replaced)
    whole = effective(CPU, method="full")
    assert ("optim", "paged_adamw_8bit", "adamw_8bit") in {(r.field, r.requested, r.used) for r in whole.replaced}
    assert whole.config.optim == "adamw_8bit"


def test_optim_overridden_by_a_plugin_is_not_replaced() -> None:
    resolved = effective(CPU, method="full", extra={"optimizer": {"type": "mine"}})
    assert "optim" not in {one.field for one in resolved.replaced}


def test_field_set_by_the_user_is_never_replaced() -> None:
    resolved = effective(CPU, gradient_checkpointing=True, bnb_4bit_compute_dtype="float32", optim="adamw_torch")
    assert resolved.replaced == []
    assert resolved.config.gradient_checkpointing is True
    assert [p.code for p in effective(CPU, optim="paged_adamw_32bit").problems] == ["not_on_this_machine"]


def test_the_models_limit_is_the_effective_length() -> None:
    config = TrainingConfig(base_model="tiny", max_seq_length=None)
    resolved = resolve_config(config, {"base_model"}, None, 256)
    assert (resolved.config.max_seq_length, resolved.replaced) == (256, [])
    (lowered,) = resolve_config(TrainingConfig(base_model="tiny"), {"base_model"}, None, 256).replaced
    assert (lowered.requested, lowered.used) == (2048, 256)


def test_a_gpu_keeps_the_defaults_unless_it_lacks_bfloat16() -> None:
    assert effective(GPU).replaced == []
    assert [(r.field, r.used) for r in effective(OLD_GPU).replaced] == [("bnb_4bit_compute_dtype", "float16")]


def test_an_unknown_machine_replaces_nothing() -> None:
    assert effective(None, method="full").config.optim == "paged_adamw_8bit"


def test_resolving_twice_changes_nothing() -> None:
    config = TrainingConfig(base_model="tiny")
    once = resolve_config(config, {"base_model"}, CPU)
    assert config == TrainingConfig(base_model="tiny")
    assert resolve_config(once.config, {"base_model"}, CPU).config == once.config
