"""Memory of each device of a run that several devices divide."""

from typing import Any

import pytest

from app.estimator import architecture
from app.estimator.activations import Precision
from app.estimator.forward_pass import Batch
from app.estimator.memory import Components, Division, estimate_memory
from app.estimator.steps import plan_steps
from tests.app.estimator.models import GIB, LLAMA, counted, effective


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_each_of_four_devices_has_a_quarter_of_what_is_divided(method: str) -> None:
    config, model = (
        effective(method=method, max_seq_length=512, optim="adamw_torch"),
        architecture.read_architecture(LLAMA),
    )
    batch = plan_steps(model, config, counted()).batch

    def on(shards: int) -> Any:
        return estimate_memory(
            model, config, Precision.for_device(config, "cuda"), batch, "full", "sdpa", Division(shards)
        )

    whole, part = on(1), on(4)
    for name in ("weights", "adapter", "gradients", "optimizer"):
        assert getattr(part.components, name) == pytest.approx(getattr(whole.components, name) / 4, abs=4)
    assert part.components.workspace > GIB, "some layers are whole for a moment"
    assert part.components.quantization_constants == whole.components.quantization_constants
    assert part.peak < whole.peak
    loaded = whole.components.weights + whole.components.quantization_constants + whole.components.context
    assert method != "qlora" or part.peak >= loaded, "a 4-bit model is divided once it is on the device"


@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize("checkpointing", ["off", "full"])
def test_each_of_four_devices_that_share_sequences_has_a_quarter_of_the_activations(
    method: str, checkpointing: Any
) -> None:
    config, model = (
        effective(method=method, max_seq_length=8192, optim="adamw_torch"),
        architecture.read_architecture(LLAMA),
    )

    def on(parts: int, length: int) -> Any:
        batch = Batch(1, length, sequence_parallel=parts)
        return estimate_memory(model, config, Precision.for_device(config, "cuda"), batch, checkpointing, "sdpa")

    def of_tokens(parts: int) -> int:
        """Casts of weights do not depend on the length."""
        difference: int = on(parts, 8192).components.activations - on(parts, 4096).components.activations
        return difference

    whole, part = on(1, 8192), on(4, 8192)
    for name in ("weights", "adapter", "gradients", "optimizer"):
        assert getattr(part.components, name) == getattr(whole.components, name), name
    # In addition, the output of attention before it is exchanged.
    assert of_tokens(1) / 4 <= of_tokens(4) < of_tokens(1) / 4 * 1.15
    assert part.peak <= whole.peak


def test_devices_that_share_experts_do_not_gather_those_of_a_layer() -> None:
    """In pairs of four devices, each gathers half of the experts of one layer; all four together gather none."""
    config = effective(method="full", max_seq_length=512, optim="adamw_torch_fused")
    model = architecture.read_architecture({"model_type": "qwen3_moe"})
    batch = plan_steps(model, config, counted()).batch

    def on(experts: int) -> Components:
        division = Division(4, experts)
        return estimate_memory(
            model, config, Precision.for_device(config, "cuda"), batch, "full", "sdpa", division
        ).components

    alone, pairs, all_four = on(1), on(2), on(4)
    # 128 experts of three matrices of 2048 x 768 with 4 bytes: two layers and the gradients of one.
    layer = 128 * 3 * 2048 * 768 * 4
    assert alone.workspace - all_four.workspace == pytest.approx(3 * layer, abs=8)
    assert pairs.workspace - all_four.workspace == pytest.approx(layer, abs=8)
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(alone, name) == getattr(pairs, name) == getattr(all_four, name)
