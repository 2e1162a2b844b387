"""Models, and configurations and datasets of their runs, of which tests estimate figures."""

from typing import Any

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import given_fields
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from app.estimator.steps import Data

# Llama-3.1-8B, as its config.json has it.
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
TINY = {
    "vocab_size": 517, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "n_embd": 64, "n_layer": 2, "n_head": 4,
}  # fmt: skip
GIB = 2**30
CHECKS = [{"type": "length", "max": 100}]


def effective(**fields: Any) -> TrainingConfig:
    """A configuration as a GPU would take it."""
    config = TrainingConfig.model_validate({"base_model": "any", **fields})
    return resolve_config(config, sorted(given_fields(fields)), DeviceCapabilities(kind="cuda", bf16=True)).config


def counted(rows: int = 100, mean: float = 100.0, largest: int = 100) -> Data:
    """A dataset whose tokens a tokenizer has counted."""
    return Data(rows, None, {"mean": mean, "max": largest, "total": round(rows * mean), "tokenizer": "any"})
