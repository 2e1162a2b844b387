"""Operations of a token are those that torch counts while it trains, to the hundredth; peaks are known or not told."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from worker.training.methods.dpo import PreferenceTrainer
from worker.training.methods.kto import RatedAnswerTrainer
from worker.training.methods.reward_model import RewardModelTrainer
from worker.training.methods.rlhf import GroupTrainer, LeaveOneOutTrainer
from worker.training.methods.sft import SupervisedTrainer
from worker.training.model import flops
from worker.training.model.peak_flops import peak_tflops

BATCH, LENGTH = 3, 24
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_implementation": "eager", "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=32),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "gpt2": lambda: GPT2Config(vocab_size=128, n_embd=64, n_layer=3, n_head=4, attn_implementation="eager"),
}
Adapt = Callable[[Any], Any]


def adapter(**options: Any) -> Adapt:
    return lambda model: get_peft_model(model, LoraConfig(**{"r": 8, "target_modules": "all-linear", **options}))


ADAPTERS: dict[str, Adapt] = {
    "full": lambda model: model,
    "lora": adapter(),
    "lora-on-some": adapter(target_modules=["o_proj", "down_proj", "c_proj"]),
    "lora-with-head": adapter(modules_to_save=["lm_head"], target_modules=["o_proj", "c_proj"]),
    "lora-with-embeddings": adapter(modules_to_save=["embed_tokens", "wte"]),
}


def measured(model: Any, **more: Any) -> tuple[int, int]:
    """What torch counts in a forward pass, and in it and its backward pass."""
    ids = torch.randint(1, 128, (BATCH, LENGTH))
    model.train()
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=ids, use_cache=False, **more)
        forward = counter.get_total_flops()
        output.logits.float().sum().backward()
    return forward, counter.get_total_flops()


def counted(model: Any, **options: bool) -> flops.Flops:
    return flops.count(model, **options)


def close(ours: float, theirs: int) -> bool:
    return ours == pytest.approx(theirs, rel=0.01)


# A tied head is trained with its embeddings, not beside them.
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [pair for pair in product(ARCHITECTURES, ADAPTERS) if pair != ("tied", "lora-with-head")],
)
def test_a_token_costs_what_torch_counts(architecture: str, kind: str) -> None:
    torch.manual_seed(0)
    model = ADAPTERS[kind](AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()))
    _, in_all = measured(model)
    assert close(counted(model).of(BATCH * LENGTH, BATCH * LENGTH**2), in_all)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_checkpointing_costs_the_hardware_another_forward_pass_and_mfu_nothing(kind: str) -> None:
    torch.manual_seed(0)
    model = ADAPTERS[kind](AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
    if kind == "lora":
        model.enable_input_require_grads()
    plain = counted(model)
    model.gradient_checkpointing_enable()
    _, in_all = measured(model)
    again = counted(model, checkpointing=True)
    # The adapters of a layer's last product are not needed again, nor is that product: less than 8 % here.
    assert again.per_token_of_hardware(LENGTH) == pytest.approx(in_all / (BATCH * LENGTH), rel=0.08)
    assert again.per_token(LENGTH) == plain.per_token(LENGTH) == plain.per_token_of_hardware(LENGTH)


def test_a_reference_pass_is_the_base_forward_without_its_adapter() -> None:
    model = ADAPTERS["lora"](AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)))
    with torch.no_grad(), model.disable_adapter(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(1, 128, (BATCH, LENGTH)), use_cache=False)
    both, alone = (counted(model, reference=reference).per_token(LENGTH) for reference in (True, False))
    assert close((both - alone) * BATCH * LENGTH, counter.get_total_flops())


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_reward_head_costs_next_to_nothing(kind: str) -> None:
    config = LlamaConfig(**SIZES, num_labels=1)
    adapt = ADAPTERS["full"] if kind == "full" else adapter(task_type=TaskType.SEQ_CLS, modules_to_save=["score"])
    model = adapt(AutoModelForSequenceClassification.from_config(config))
    _, in_all = measured(model)
    assert close(counted(model).of(BATCH * LENGTH, BATCH * LENGTH**2), in_all)


def test_a_token_costs_only_the_experts_that_it_is_sent_to() -> None:
    sizes = SIZES | {"num_local_experts": 8, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes))
    _, in_all = measured(model)
    assert close(counted(model).of(BATCH * LENGTH, BATCH * LENGTH**2), in_all)


def test_a_quantized_weight_counts_by_its_true_shape() -> None:
    class Net(nn.Module):
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.embed, self.up, self.down = nn.Embedding(7, 64), linear(64, 256), linear(256, 64)

    packed = Net(Linear4bit).to("cpu")
    assert packed.up.weight.numel() * 2 == 64 * 256
    packed.requires_grad_(False)
    plain = Net(nn.Linear).requires_grad_(False)
    assert counted(packed) == counted(plain) == flops.Flops(2 * 2 * 64 * 256, 0)


def test_pairs_are_the_squares_of_the_lengths_padded_or_packed() -> None:
    padded = {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])}
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    assert float(flops.token_pairs(padded)) == float(flops.token_pairs(packed)) == 13


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10G", 70.0), ("NVIDIA A10", 125.0), ("NVIDIA L4", 121.0), ("NVIDIA L40S", 362.0), ("Tesla T4", 65.0),
        ("Tesla V100-PCIE-16GB", 112.0), ("Tesla V100-SXM2-32GB", 125.0), ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GH200 480GB", 989.4), ("NVIDIA B200", 2250.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA RTX A6000", 154.8), ("AMD Instinct MI300X", None),
        (None, None),
    ],
)  # fmt: skip
def test_a_peak_is_that_of_the_very_device_or_none(name: str | None, peak: float | None) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.parametrize(
    "trainer",
    [SupervisedTrainer, PreferenceTrainer, RatedAnswerTrainer, RewardModelTrainer, GroupTrainer, LeaveOneOutTrainer],
)
def test_no_micro_batch_has_all_parameters_counted_for_a_sum_that_nothing_reads(trainer: Any) -> None:
    """By default transformers asks the model, which walks over its parameters; this one would raise."""
    without_a_model = trainer.__new__(trainer)
    assert trainer.floating_point_ops(without_a_model, {"input_ids": torch.ones(1, 8)}) == 0
