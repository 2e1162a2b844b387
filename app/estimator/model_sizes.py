"""The largest model that a device can train, by the memory estimate of models of one shape."""

from functools import lru_cache
from typing import Literal

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from app.estimator.activations import Precision
from app.estimator.architecture import Architecture, read_architecture
from app.estimator.forward_pass import Batch
from app.estimator.memory import estimate_memory
from app.estimator.memory_planner import USABLE_FRACTION
from app.estimator.parameters import total_parameters

_TOKENS = 2048
_MOST_HEADS = 512
_SETTINGS = {"method": "qlora", "batch_size": 1, "max_seq_length": _TOKENS, "gradient_checkpointing": True}


@lru_cache(maxsize=64)
def largest_model(kind: Literal["cpu", "cuda"], memory_mb: int) -> float:
    """Return the parameters, in billions, of the largest dense model that fits by QLoRA; 0 if none does.

    One row of 2,048 tokens at a time, with full recomputation. The models have the shape of Llama, with as
    many layers as attention heads, from 1 to 512.
    """
    machine = DeviceCapabilities(kind=kind, bf16=True, flash_attention=True, flash_attention_3=True)
    config = resolve_config(
        TrainingConfig.model_validate({"base_model": "any", **_SETTINGS}), sorted(_SETTINGS), machine
    ).config
    precision, room = Precision.for_device(config, kind), memory_mb * 2**20 * USABLE_FRACTION

    def is_fitting(heads: int) -> bool:
        return (
            estimate_memory(_model_with_heads(heads), config, precision, Batch(1, _TOKENS), "full", "sdpa").peak <= room
        )

    fitting, too_large = 0, _MOST_HEADS + 1
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        fitting, too_large = (middle, too_large) if is_fitting(middle) else (fitting, middle)
    return round(total_parameters(_model_with_heads(fitting)) / 1e9, 1) if fitting else 0.0


def _model_with_heads(heads: int) -> Architecture:
    return read_architecture(
        {
            "model_type": "llama", "vocab_size": 128_256, "hidden_size": 128 * heads, "intermediate_size": 448 * heads,
            "num_hidden_layers": max(heads, 4), "num_attention_heads": heads, "num_key_value_heads": heads,
            "max_position_embeddings": 8192,
        }
    )  # fmt: skip
