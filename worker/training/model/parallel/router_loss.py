"""Auxiliary loss of the routers of a mixture of experts, over the tokens of all ranks of a run.

It is the product of two means over the tokens of a micro-batch, so the mean of the losses of the ranks is another loss.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers.models.mixtral import modeling_mixtral

_NAME = "load_balancing_loss_func"
"""Function of the modules of transformers; TRL takes that of Mixtral for every family."""


class RouterLoss:
    """Replaces the auxiliary loss of a model by that of all ranks, where every rank computes it."""

    def __init__(self, model: Any) -> None:
        """Replace the function that TRL calls, and that of the model's own module where it computes the same."""
        self._alone = getattr(modeling_mixtral, _NAME)
        self._is_shared = self._in_evaluation = False
        self._weight = 1.0
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        own = sys.modules[type(base).__module__]
        modules = [modeling_mixtral]
        if hasattr(own, _NAME) and inspect.getsource(getattr(own, _NAME)) == inspect.getsource(self._alone):
            modules.append(own)
        for module in modules:
            setattr(module, _NAME, self._auxiliary_loss)

    @contextmanager
    def over_ranks(self, *, counts: bool, in_evaluation: bool = False) -> Iterator[None]:
        """During the block, every rank computes the loss as often, over the tokens of all that `counts`.

        In training, the loss of a forward pass without gradients is that of this rank alone, since ranks may generate
        texts of other lengths.
        """
        self._is_shared, self._in_evaluation, self._weight = True, in_evaluation, float(counts)
        try:
            yield
        finally:
            self._is_shared = False

    def _auxiliary_loss(
        self,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        together = self._is_shared and (self._in_evaluation or torch.is_grad_enabled())
        if not together or not isinstance(gate_logits, tuple):
            return self._alone(gate_logits, num_experts, top_k, attention_mask)
        device = gate_logits[0].device
        chosen = probabilities = torch.zeros(0, device=device)
        mask = None if attention_mask is None else attention_mask.reshape(-1, 1).to(device, torch.float32)
        tokens = torch.zeros(1, device=device)
        for of_layer in gate_logits:
            shares = torch.nn.functional.softmax(of_layer.to(device), dim=-1)
            picked = torch.zeros_like(shares, dtype=torch.float32).scatter_(1, torch.topk(shares, top_k).indices, 1.0)
            weights = torch.ones(len(shares), 1, device=device) if mask is None else mask
            sums = (picked * weights).sum(dim=0), (shares.float() * weights).sum(dim=0)
            chosen, probabilities = sums if not len(chosen) else (chosen + sums[0], probabilities + sums[1])
            tokens = tokens + weights.sum()
        own = torch.cat([chosen, probabilities, tokens]) * self._weight
        chosen, probabilities, tokens = _SumOverRanks.apply(own).split([len(chosen), len(chosen), 1])
        return (chosen / tokens * probabilities / tokens).sum() * len(chosen)


class _SumOverRanks(torch.autograd.Function):  # type: ignore[misc]
    """Sum over the ranks; its gradient is the sum of theirs, since the loss of each depends on the values of all."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _sum_over_ranks(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _sum_over_ranks(gradients[0])


def _sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total
