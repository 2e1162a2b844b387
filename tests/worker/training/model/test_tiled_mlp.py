"""A tiled MLP trains as a whole one, and keeps less."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.worker.training.tiny import Forks, make_job
from worker.training.failures import TrainingFailure
from worker.training.model.tiled_mlp import tile_mlps

IDS = torch.arange(96).reshape(2, 48)


def loss_and_gradients(model: Any) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss and gradients of a training step, and the bytes kept for its backward pass."""
    saved_bytes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved_bytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return (
        loss.item(),
        {name: parameter.grad for name, parameter in model.named_parameters()},
        sum(saved_bytes.values()),
    )


def test_losses_and_gradients_equal_those_of_a_whole_mlp_and_less_is_kept() -> None:
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config)
    tiled = LlamaForCausalLM(config)
    tiled.load_state_dict(whole.state_dict())
    tile_mlps(tiled, tile=20)  # the last tile is smaller
    loss, gradients, saved_bytes = loss_and_gradients(whole)
    tiled_loss, tiled_gradients, tiled_kept = loss_and_gradients(tiled)
    assert tiled_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(tiled_gradients[name], gradient, rtol=1e-4, atol=1e-6)
    inner = 2 * 3 * IDS.numel() * config.intermediate_size * 4  # gate, up and their product, in two layers
    assert saved_bytes - tiled_kept >= inner


def test_a_model_whose_mlps_are_experts_is_refused() -> None:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(TrainingFailure, match="have no MLP that can be tiled") as refused:
        tile_mlps(Qwen3MoeForCausalLM(config))
    assert refused.value.code == "config_error"


def test_a_run_trains_with_tiled_mlps(forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
    config = {"method": "lora", "lora_r": 4, "max_steps": 2, "max_seq_length": 64, "extra": {"tiled_mlp": True}}
    done = forks.run(make_job(tmp_path, tiny_model, chats, **config))
    assert done.result["outcome"] == "completed", done.result
    AutoModelForCausalLM.from_pretrained(tiny_model).load_adapter(str(done.output))
