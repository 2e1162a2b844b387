"""Memory of a device for the keys and values of tokens."""

from typing import Any

import torch

from worker.training.checkpointing.pinned_memory import host_memory

_FREE_PART = {"cuda": 0.6, "cpu": 0.25}
"""Part of the free memory that caches may take. The rest of a GPU's is for activations, adapters and fragments; that of
a host also for other processes."""
_UNKNOWN = 16_384
_MOST_TOKENS = 2**22


def fitting_cache_tokens(model: Any) -> int:
    """Return the number of tokens whose keys and values fit beside a model on its device."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(width, int)):
        return _UNKNOWN
    head_width = getattr(config, "head_dim", None) or width // config.num_attention_heads
    token_bytes = 2 * layers * heads * head_width * torch.finfo(model.dtype).bits // 8
    kind = model.device.type
    if kind == "cuda":
        free, _ = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    else:
        _, free = host_memory()
    return min(int(free * _FREE_PART[kind] / token_bytes), _MOST_TOKENS)
