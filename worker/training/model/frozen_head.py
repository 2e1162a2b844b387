"""Log-probabilities of tokens under a frozen head, with two products with its weights instead of three.

TRL computes logits in tiles, and again in the backward pass for the gradient of the hidden states. A log-probability
depends on the hidden state of its own position alone, so its derivative can be computed while its logits are there, and
the backward pass multiplies it with the gradient of the log-probability, whatever the loss is.
The only module that uses the kernels of TRL.
"""

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from trl.kernels import chunked_logprob as kernels
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from worker.training.overrides import replace_log_probabilities

_ROWS_MULTIPLE = 256
"""Rows of a tile are a multiple of it, as matrix products are computed in blocks."""


def use_two_products() -> None:
    """Let the heads that TRL adds to models compute with two products from now on, where their weights are frozen."""
    replace_log_probabilities(LogProbabilities)


class LogProbabilities:
    """Stands for the function of TRL, and leaves to it heads that are trained and passes without gradients."""

    @staticmethod
    def apply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *more: Any) -> tuple[Any, ...]:
        """Return what `ChunkedLogProbFunction.apply` returns for the same arguments."""
        is_trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        has_gradient = torch.is_grad_enabled() and hidden.requires_grad
        function = _FrozenHead if has_gradient and not is_trained else ChunkedLogProbFunction
        outputs: tuple[Any, ...] = function.apply(hidden, weight, bias, *more)
        return outputs


class _FrozenHead(torch.autograd.Function):  # type: ignore[misc]
    """`ChunkedLogProbFunction` with the derivative of each log-probability computed in the forward pass.

    Its tiles have all of the vocabulary and fewer rows, in as much memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        device, (rows, vocabulary) = hidden.device, (len(hidden), len(weight))
        autocasts = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocasts else hidden.dtype
        transform = {
            "logit_scale": logit_scale, "softcap": final_logit_softcapping or 1.0, "inv_t": 1 / temperature,
            "HAS_SOFTCAP": final_logit_softcapping is not None, "BLOCK_SIZE": kernels._BLOCK_SIZE,
        }  # fmt: skip
        flags = {f"HAS_{name.upper()}": name in outputs for name in kernels.OPTIONAL_OUTPUTS}
        weight = weight.to(dtype)
        # Tensors of their own, aligned whatever their size: Triton compiles a kernel again for other alignments.
        statistics = [torch.zeros(rows, device=device) for _ in range(7)]
        highest, exp_sum, weighted_sum, square_sum, logit_sum, highest_before, target_logit = statistics
        highest.fill_(-math.inf)
        highest_before.fill_(-math.inf)
        log_z, ones = torch.empty(rows, device=device), torch.ones(rows, device=device)
        slopes = torch.empty(hidden.shape, device=device, dtype=dtype)
        size = _tile_rows(rows, kernels.TOKEN_CHUNK_SIZE * chunk_size // vocabulary)
        tiles = torch.empty(size, vocabulary, device=device, dtype=dtype)
        for start in range(0, rows, size):
            part = slice(start, start + size)
            tile = tiles[: len(targets[part])]
            torch.mm(hidden[part].to(dtype), weight.t(), out=tile)
            if bias is not None:
                tile.add_(bias.to(dtype))
            _forward_kernel(tile)(
                tile, tile.stride(0), targets[part], *(each[part] for each in statistics), 0, vocabulary,
                **flags, **transform,
            )  # fmt: skip
            log_z[part] = highest[part] + exp_sum[part].log()
            # Replaces the logits by the derivatives of the log-probability of the target; entropy has no gradient.
            _backward_kernel(tile)(
                tile, tile.stride(0), targets[part], log_z[part], log_z[part], ones[part], log_z[part], 0, vocabulary,
                HAS_LOGPROB_GRAD=True, HAS_ENTROPY_GRAD=False, **transform,
            )  # fmt: skip
            torch.mm(tile, weight, out=slopes[part])
        ctx.save_for_backward(slopes)
        ctx.dtype = hidden.dtype
        is_top1 = (target_logit >= highest) & (target_logit > highest_before) if "is_top1" in outputs else None
        results = {
            "entropy": log_z - weighted_sum / exp_sum,
            "log_sum_sq_probs": square_sum.log() - 2 * exp_sum.log(),
            "mean_logits": logit_sum / vocabulary,
        }
        more = [results[name] if name in outputs else None for name in results]
        ctx.mark_non_differentiable(*(result for result in (*more[1:], is_top1) if result is not None))
        return target_logit - log_z, *more, is_top1

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, logprob_grad: torch.Tensor | None, entropy_grad: torch.Tensor | None, *_: Any) -> Any:
        if entropy_grad is not None:
            raise RuntimeError("The entropy under a frozen head has no gradient: use a loss without an entropy term.")
        (slopes,) = ctx.saved_tensors
        grad = None if logprob_grad is None else (slopes * logprob_grad[:, None]).to(ctx.dtype)
        return grad, *[None] * 8


def _tile_rows(rows: int, limit: int) -> int:
    """Return the number of rows of a tile: all if at most `limit`, else a multiple of what products are computed in."""
    whole = limit // _ROWS_MULTIPLE * _ROWS_MULTIPLE
    return max(1, min(rows, whole or limit))


def _forward_kernel(tile: torch.Tensor) -> Any:
    return kernels._forward_kernel[(len(tile),)] if kernels._use_triton(tile.device) else kernels._forward_tile


def _backward_kernel(tile: torch.Tensor) -> Any:
    if not kernels._use_triton(tile.device):
        return kernels._backward_tile
    blocks = -(-tile.shape[1] // kernels._BLOCK_SIZE)
    return kernels._backward_kernel[(len(tile), blocks)]
