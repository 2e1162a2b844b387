"""Operations of a token are those that torch counts while it trains, to the hundredth; peaks are known or not told."""

from itertools import product
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator import architecture
from app.estimator.activations import Checkpointing, recomputed_layers
from app.estimator.flops import StepOperations, step_operations
from worker.training.measurement.throughput import token_pairs
from worker.training.methods.dpo import PreferenceTrainer
from worker.training.methods.kto import RatedAnswerTrainer
from worker.training.methods.reward_model import RewardModelTrainer
from worker.training.methods.rlhf import GroupTrainer, LeaveOneOutTrainer
from worker.training.methods.sft import SupervisedTrainer
from worker.training.model.loader import lora_config
from worker.training.model.peak_flops import peak_tflops
from worker.training.planning.recomputation import Recomputation

SEQUENCES, LENGTH = 3, 24
TOKENS, PAIRS = SEQUENCES * LENGTH, SEQUENCES * LENGTH**2
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = SIZES | {"num_experts_per_tok": 2, "experts_implementation": "eager"}
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"), SIZES),
    "llama, tied": SIZES | {"tie_word_embeddings": True, "head_dim": 32},
    "gpt2": {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4},
    "mixtral": EXPERTS | {"num_local_experts": 8},
    "qwen2_moe": EXPERTS | {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS | {"num_experts": 8, "moe_intermediate_size": 32},
}
LORA: dict[str, Any] = {"method": "lora", "load_in_4bit": False, "lora_r": 8, "lora_dropout": 0.0}
HEAD, EMBEDDINGS, OUT = "head", "embeddings", "attention output"
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "lora_r": None, "load_in_4bit": False},
    "lora": LORA,
    "lora on some": LORA | {"target_modules": [OUT]},
    "lora with head": LORA | {"target_modules": [OUT], "modules_to_save": [HEAD]},
    "lora with embeddings": LORA | {"target_modules": [OUT], "modules_to_save": [EMBEDDINGS]},
}
FAMILIES_OF_NAMES = ("llama", "llama, tied", "gpt2", "phi")
"""Models of each way to name modules; with adapters of some modules `make test` has no others."""
COMBINATIONS = [
    pytest.param(name, kind, marks=() if kind in ("full", "lora") or name in FAMILIES_OF_NAMES else pytest.mark.full)
    for name, kind in product(MODELS, ADAPTERS)
    # A tied head is trained with its embeddings. For adapters of experts see the test below.
    if (name, kind) not in (("llama, tied", "lora with head"), ("mixtral", "lora"), ("qwen3_moe", "lora"))
]


def described(name: str, **more: Any) -> Any:
    return CONFIG_MAPPING[name.partition(",")[0]](**MODELS[name], **more)


def configured(name: str, kind: str) -> TrainingConfig:
    """The configuration, with the names that the modules have in this family."""
    names = {"gpt2": ("lm_head", "wte", "c_proj"), "phi": ("lm_head", "embed_tokens", "dense")}
    own = dict(zip((HEAD, EMBEDDINGS, OUT), names.get(name, ("lm_head", "embed_tokens", "o_proj")), strict=True))
    options = {
        field: [own[part] for part in value] if isinstance(value, list) else value
        for field, value in ADAPTERS[kind].items()
    }
    return TrainingConfig.model_validate({"base_model": "any", **options})


def built(name: str, kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(described(name), attn_implementation="eager")
    adapter = lora_config(configured(name, kind))
    return model if adapter is None else get_peft_model(model, adapter)


def counted(name: str, config: TrainingConfig, checkpointing: Checkpointing = "off", **more: int) -> StepOperations:
    model = architecture.read_architecture(described(name).to_dict())
    return step_operations(model, config, checkpointing, **more)


def measured(model: Any, sequences: int = SEQUENCES) -> tuple[int, int]:
    """What torch counts in a forward pass, and in it and its backward pass."""
    ids = torch.randint(1, 128, (sequences, LENGTH))
    model.train()
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=ids, use_cache=False)
        forward = counter.get_total_flops()
        output.logits.float().sum().backward()
    return forward, counter.get_total_flops()


def close(ours: float, theirs: int) -> bool:
    return ours == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(("name", "kind"), COMBINATIONS)
def test_a_token_costs_what_torch_counts(name: str, kind: str) -> None:
    forward, in_all = measured(built(name, kind))
    step = counted(name, configured(name, kind))
    assert close(step.forward.total_for(TOKENS, PAIRS), forward)
    assert close(step.training.total_for(TOKENS, PAIRS), in_all)
    assert step.hardware == step.training


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_checkpointing_costs_the_hardware_another_forward_pass_of_layers_and_mfu_nothing(
    kind: str, checkpointing: Checkpointing
) -> None:
    model, config = built("llama", kind), configured("llama", kind)
    recomputation = Recomputation(model)
    recomputation.recompute_first(recomputed_layers(checkpointing, recomputation.layers))
    _, in_all = measured(model)
    again = counted("llama", config, checkpointing)
    # The adapters of a layer's last product are not needed again, nor is that product: less than 8 % here.
    assert again.hardware.total_for(TOKENS, PAIRS) == pytest.approx(in_all, rel=0.08)
    # Recomputed layers pass a gradient down to the embeddings, which those of an adapter otherwise do not need.
    rel = 0.0 if kind == "full" else 0.05
    assert again.training.token == pytest.approx(counted("llama", config).training.token, rel=rel)


def test_a_reference_pass_is_the_base_forward_without_its_adapter() -> None:
    model, config = built("llama", "lora"), configured("llama", "lora")
    with torch.no_grad(), model.disable_adapter(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(1, 128, (SEQUENCES, LENGTH)), use_cache=False)
    alone, both = (counted("llama", config, reference_passes=passes).training for passes in (0, 2))
    assert close((both.total_for(TOKENS, PAIRS) - alone.total_for(TOKENS, PAIRS)) / 2, counter.get_total_flops())


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_reward_head_costs_next_to_nothing(kind: str) -> None:
    config = configured("llama", kind).model_copy(update={"method": "reward"})
    model: Any = AutoModelForSequenceClassification.from_config(
        described("llama", num_labels=1), attn_implementation="eager"
    )
    adapter = lora_config(config, head="reward")
    _, in_all = measured(model if adapter is None else get_peft_model(model, adapter))
    assert close(counted("llama", config).training.total_for(TOKENS, PAIRS), in_all)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_an_adapter_of_experts_costs_a_token_the_gradients_of_the_matrices_that_it_is_sent_to(name: str) -> None:
    """Peft adds the adapter to these matrices once per batch, so it is the difference between batches that counts."""
    model = built(name, "lora")
    (_, some), (_, more) = (measured(model, sequences) for sequences in (SEQUENCES, 3 * SEQUENCES))
    step = counted(name, configured(name, "lora"))
    assert close(step.training.total_for(2 * TOKENS, 2 * PAIRS), more - some)


def test_a_quantized_weight_counts_by_its_true_shape() -> None:
    lora = configured("llama", "lora")
    assert counted("llama", lora.model_copy(update={"load_in_4bit": True})) == counted("llama", lora)


def test_pairs_are_the_squares_of_the_lengths_padded_or_packed() -> None:
    padded = {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])}
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    assert float(token_pairs(padded)) == float(token_pairs(packed)) == 13


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10G", 70.0), ("NVIDIA A10", 125.0), ("NVIDIA L4", 121.0), ("NVIDIA L40S", 362.0), ("Tesla T4", 65.0),
        ("Tesla V100-PCIE-16GB", 112.0), ("Tesla V100-SXM2-32GB", 125.0), ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GH200 480GB", 989.4), ("NVIDIA B200", 2250.0), ("NVIDIA GB300", 2500.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None), ("AMD Instinct MI300X", None),
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
