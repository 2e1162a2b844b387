"""Any number of layers can be recomputed, by any call that enables it; results are bit-identical, with less memory."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig
from trl.models.utils import disable_gradient_checkpointing

from benchmarks.counting_meter import CountingMeter
from worker.training.planning.recomputation import Recomputation

LAYERS = 4
_LLAMA = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=160, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, attention_dropout=0.1,
)  # fmt: skip


def build_model(*, adapter: bool = False) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(_LLAMA, attn_implementation="sdpa")
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])) if adapter else model


def take_pass(model: Any) -> float:
    """Take a pass forward and backward, and return its loss."""
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    ids = torch.randint(1, 128, (2, 24))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss.item())


def recomputed_layers(model: Any) -> list[bool]:
    return [bool(layer.gradient_checkpointing) for layer in model.get_decoder().layers]


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
def test_loss_and_gradients_are_the_same_bits_with_any_number_of_recomputed_layers(
    adapter: bool, reference: bool
) -> None:
    model = build_model(adapter=adapter)
    loss = take_pass(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    recomputation = Recomputation(model)
    for count in (1, 2, LAYERS, 3, 0):
        recomputation.recompute_first(count)
        if reference and count:  # as the trainers of preferences do in every step
            with disable_gradient_checkpointing(model):
                assert recomputed_layers(model) == [False] * LAYERS
            assert recomputed_layers(model) == [True] * LAYERS
        assert take_pass(model) == loss
        assert recomputed_layers(model) == [layer < count for layer in range(LAYERS)]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is gradient is None or torch.equal(parameter.grad, gradient)


def test_what_enables_recomputation_for_all_layers_later_enables_it_for_the_chosen_ones() -> None:
    model = build_model()
    Recomputation(model).recompute_first(2)
    model.activation_checkpointing_enable()  # as the trainer does when training begins
    take_pass(model)
    assert recomputed_layers(model) == [True, True, False, False]


def test_first_layers_need_no_more_memory_than_spread_ones_and_less_than_the_last() -> None:
    def peak_of(chosen: set[int]) -> int:
        model = build_model()
        model.activation_checkpointing_enable()
        for number, layer in enumerate(model.get_decoder().layers):
            layer.gradient_checkpointing = number in chosen
        peak = CountingMeter(2**40).measure(lambda: void(take_pass(model))).peak_bytes
        assert peak is not None
        return peak

    first, spread, last = (peak_of(chosen) for chosen in ({0, 1}, {0, 2}, {2, 3}))
    assert first <= spread < last


def void(_: Any) -> None:
    """Ignore a result."""


def test_every_further_recomputed_layer_saves_memory_until_the_gradients_need_more() -> None:
    model = build_model(adapter=True)
    recomputation, peaks = Recomputation(model), []
    for count in range(LAYERS + 1):
        recomputation.recompute_first(count)
        peak = CountingMeter(2**40).measure(lambda: void(take_pass(model))).peak_bytes
        assert peak is not None
        peaks.append(peak)
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.75 * peaks[0]
    line = [peaks[0] + (peaks[-1] - peaks[0]) * count / LAYERS for count in range(LAYERS + 1)]
    assert all(peak <= expected for peak, expected in zip(peaks, line, strict=True)), "the planner relies on it"


@pytest.mark.parametrize(("value", "layers"), [(False, 0), ("selective", 2), (True, LAYERS)])
def test_selective_means_half_of_the_layers(value: Any, layers: int) -> None:
    assert Recomputation(build_model()).layers_of(value) == layers
