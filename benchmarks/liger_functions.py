"""The functions of liger-kernel without its Triton kernels: what they allocate, keep and overwrite, on fake tensors.

They follow `LigerRMSNormFunction`, `LigerRopeFunction`, `LigerSiLUMulFunction` and `LigerGELUMulFunction` of 0.8.5.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any
from unittest import mock

import torch

from app.estimator.forward_pass import WITH_NEW_NORM_GRADIENTS
from worker.training.model.experts import expert_modules


class _Norm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, is_in_place: bool) -> torch.Tensor:
        hidden = hidden.contiguous()
        rows = hidden.view(-1, hidden.shape[-1])
        ctx.is_in_place = is_in_place
        ctx.save_for_backward(rows, weight, torch.empty(len(rows), device=hidden.device))
        return torch.empty_like(rows).view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradient.contiguous()
        _, weight, _ = ctx.saved_tensors
        weight_gradient = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return (gradient if ctx.is_in_place else torch.zeros_like(gradient)), weight_gradient, None


class _Rotation(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cosine, sine)
        return _contiguous_by_token(query), _contiguous_by_token(key)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(_contiguous_by_token(gradient) for gradient in gradients), None, None


def _contiguous_by_token(heads: torch.Tensor) -> torch.Tensor:
    """Return heads (sequences, heads, tokens, width), copied if those of a token are not next to each other."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


class _Gated(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        return gate.view(gradient.shape), up.view(gradient.shape)


@contextmanager
def liger_functions(network: Any) -> Iterator[None]:
    """Let a model compute its norms, rotary embeddings and gated layers with them during the block."""
    is_in_place = network.config.model_type not in WITH_NEW_NORM_GRADIENTS

    def norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Norm.apply(hidden, module.weight, is_in_place)
        return result

    for module in network.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)
        elif hasattr(module, "down_proj") and not any(expert_modules(network)):
            module.forward = MethodType(_joined_mlp if hasattr(module, "gate_up_proj") else _mlp, module)
    with mock.patch.object(sys.modules[type(network).__module__], "apply_rotary_pos_emb", _rotate):
        yield


def _rotate(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, ...]:
    rotated: tuple[torch.Tensor, ...] = _Rotation.apply(query, key, cosine, sine)
    return rotated


def _mlp(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.down_proj(_Gated.apply(module.gate_proj(hidden), module.up_proj(hidden)))
    return result


def _joined_mlp(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.down_proj(_Gated.apply(*module.gate_up_proj(hidden).chunk(2, dim=-1)))
    return result
