"""Mixed precision as on a GPU, and an attention that refuses 32 bits, as flash attention does."""

import json
from typing import Any

import torch
from transformers.integrations.flash_attention import get_target_dtype
from transformers.modeling_utils import AttentionInterface

from worker.training.methods import pipeline
from worker.training.model.attention import VARLEN


def begin() -> None:
    """From now on in this process; prints once for each kind of pass that reaches the attention."""
    arguments = pipeline.trainer_arguments
    pipeline.trainer_arguments = lambda *positional: arguments(*positional) | {"bf16": True}
    reached: set[tuple[bool, bool]] = set()

    own = AttentionInterface()[VARLEN]

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **options: Any):  # type: ignore[no-untyped-def]
        dtype = get_target_dtype(query, module) or query.dtype  # what transformers casts to before flash attention
        if dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, not {dtype}")
        kind = (module.training, torch.is_grad_enabled())
        if kind not in reached:
            reached.add(kind)
            print(json.dumps({"type": "attention", "training": kind[0], "gradients": kind[1]}), flush=True)
        return own(module, query.to(dtype), key.to(dtype), value.to(dtype), *more, **options)

    AttentionInterface.register(VARLEN, attention)
