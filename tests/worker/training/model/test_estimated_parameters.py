"""Parameters by formula are those of the model that transformers and peft build, to the last one."""

import json
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator import architecture, parameters
from worker.training.model.loader import lora_config

_SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT2: dict[str, Any] = {"vocab_size": 131, "n_embd": 64, "n_layer": 3, "n_head": 4}
_MOE: dict[str, Any] = {**_SIZES, "num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2}

# Of each family what its own code takes by default (all of them real sizes), and what may be different in it.
GRID: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in architecture.FAMILIES),
    ("llama", _SIZES),
    ("llama", {**_SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("mistral", {**_SIZES, "head_dim": 32}),
    ("qwen2", {**_SIZES, "tie_word_embeddings": True}),
    ("qwen3", {**_SIZES, "attention_bias": True}),
    ("gemma", {**_SIZES, "head_dim": 16}),
    ("gemma2", {**_SIZES, "head_dim": 16, "attention_bias": True}),
    ("gemma3_text", {**_SIZES, "head_dim": 16}),
    ("phi", {**_SIZES, "qk_layernorm": True}),
    ("phi", {**_SIZES, "tie_word_embeddings": True}),
    ("phi3", _SIZES),
    ("mixtral", {**_SIZES, "num_local_experts": 4}),
    ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1], "qkv_bias": False}),
    ("qwen3_moe", {**_MOE, "decoder_sparse_step": 2}),
    ("gpt2", {**_GPT2, "n_inner": 80, "tie_word_embeddings": False}),
]
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"lora_r": None, "method": "full"},
    "lora": {"method": "lora"},
    "dora": {"method": "lora", "use_dora": True, "lora_r": 4},
    "some": {"method": "lora", "target_modules": ["q_proj", "down_proj"]},
    "embeddings": {"method": "lora", "modules_to_save": ["embed_tokens"], "target_modules": ["v_proj"]},
    "head": {"method": "lora", "modules_to_save": ["lm_head"]},
    "tokens": {"method": "lora", "trainable_token_indices": [3, 5, 7]},
    "norms": {"method": "lora", "modules_to_save": ["input_layernorm"]},
    "reward": {"method": "reward"},
    "reward-full": {"method": "reward", "lora_r": None},
}


def built(family: str, sizes: dict[str, Any], *, reward: bool = False) -> tuple[Any, architecture.Architecture]:
    """A model without memory, and what its config.json says, which holds only what differs from the defaults."""
    config = CONFIG_MAPPING[family](**sizes)
    written = json.loads(config.to_json_string(use_diff=True))
    config.num_labels = 1
    auto = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config), architecture.read_architecture(written)


@pytest.mark.parametrize("reward", [False, True], ids=["causal", "reward"])
@pytest.mark.parametrize(("family", "sizes"), GRID)
def test_a_model_has_the_parameters_that_its_config_json_comes_to(
    family: str, sizes: dict[str, Any], reward: bool
) -> None:
    model, described = built(family, sizes, reward=reward)
    assert parameters.total_parameters(described, reward_head=reward) == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen2_moe"])
def test_what_trains_is_what_peft_makes_trainable(family: str, kind: str) -> None:
    config = TrainingConfig(base_model="any", **ADAPTERS[kind])
    reward = config.method == "reward"
    model, described = built(family, _MOE if "moe" in family else _SIZES, reward=reward)
    adapter_config = lora_config(config, head="reward" if reward else "causal")
    if adapter_config is not None:
        with torch.device("meta"):
            model = get_peft_model(model, adapter_config)
    theirs = sorted(one.numel() for one in model.parameters() if one.requires_grad)
    estimated = parameters.trainable_part(described, config)
    assert estimated.count == sum(theirs)
    assert sorted(rows * columns for _, rows, columns in estimated.tensors) == theirs


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "mamba"}, "family 'mamba' is not supported"),
        ({}, "family 'None' is not supported"),
        ({"model_type": "llama", "hidden_size": "wide"}, "`hidden_size` is 'wide', which is not a valid size"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "family 'gemma3' is not supported"),
    ],
)
def test_a_model_that_cannot_be_counted_is_not_guessed(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(architecture.UnknownArchitecture, match=sentence):
        architecture.read_architecture(config)


@pytest.mark.parametrize(("family", "sizes"), [("mixtral", {**_SIZES, "num_local_experts": 4}), ("qwen3_moe", _MOE)])
def test_experts_that_peft_adapts_are_counted_as_it_does(family: str, sizes: dict[str, Any]) -> None:
    model, described = built(family, sizes)
    config = TrainingConfig(base_model="any", method="lora", lora_r=4, lora_dropout=0.0)
    with torch.device("meta"):
        model = get_peft_model(model, lora_config(config))
    theirs = sorted(one.numel() for one in model.parameters() if one.requires_grad)
    estimated = parameters.trainable_part(described, config)
    assert sorted(rows * columns for _, rows, columns in estimated.tensors) == theirs
    with pytest.raises(parameters.CannotTrain, match="`lora_dropout`"):
        parameters.trainable_part(described, config.model_copy(update={"lora_dropout": 0.1}))


def test_a_module_that_the_model_has_not_is_named() -> None:
    described = architecture.read_architecture({"model_type": "llama"})
    config = TrainingConfig(base_model="any", method="lora", target_modules=["query"])
    with pytest.raises(parameters.CannotTrain, match="no linear layer named query"):
        parameters.trainable_part(described, config)
