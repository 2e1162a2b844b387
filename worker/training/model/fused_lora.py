"""LoRA layers whose forward pass keeps their input, and nothing else of its size.

peft computes `base(x) + scaling * up(down(dropout(x)))` as separate operations, which keep a mask and a masked copy of
`x` for every projection, and on some bases a copy of `x` in 32 bits. Here it is one operation: it keeps `x` itself,
which neighboring projections share, and on a GPU no mask: the kernels of `dropout` need none, and without them
the backward pass draws it again.
peft still owns the modules, and with them saving, loading and merging.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from bitsandbytes.nn.modules import fix_4bit_weight_quant_state_from_module
from peft.tuners import lora
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from worker.training.model.dropout.mask import draw_seed
from worker.training.model.dropout.products import kernel_failure, triton_products

_LORA_LAYERS = (lora.Linear, lora.Linear4bit, lora.Linear8bitLt)
_BASE_LAYERS = (nn.Linear, Linear4bit, Linear8bitLt)
_REDRAWS_ON = {"cuda"}
"""Devices on which the mask is drawn again instead of kept. A CPU has memory, and takes long to draw."""


def fuse_lora_layers(model: nn.Module) -> str | None:
    """Replace the forward pass of LoRA layers by the fused one, and return which layers have it; None without LoRA.

    Embeddings, convolutions, experts and DoRA keep peft's. A fused layer leaves to peft what only peft computes:
    disabled, merged, several and mixed adapters.
    """
    layers = [module for module in model.modules() if isinstance(module, lora.LoraLayer)]
    fusible = [layer for layer in layers if _is_fusible(layer)]
    for layer in fusible:
        layer.forward = MethodType(_fused_forward, layer)
    if not layers:
        return None
    return {0: "peft", len(layers): "fused"}.get(len(fusible), f"{len(fusible)} of {len(layers)} layers fused")


def dropout_kernels(model: nn.Module, *, is_half: bool = True) -> str | None:
    """Return what computes the dropout of fused layers on the current GPU, if there is one; None without dropout.

    The kernels compute in 16 bits: without `is_half`, torch does.
    """
    fused = [(layer, _fusible_adapter(layer)) for layer in model.modules() if _is_fusible(layer)]
    ranks = {layer.r[adapter] for layer, adapter in fused if getattr(layer.lora_dropout[adapter], "p", 0.0)}
    if not ranks:
        return None
    if not is_half or not torch.cuda.is_initialized():
        return "torch"
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    failures = {rank: failure for rank in ranks if (failure := kernel_failure(device, rank, dtype, dtype))}
    reason = "; ".join(sorted(set(failures.values())))
    if len(failures) == len(ranks):
        return f"torch (Triton kernels cannot be used: {reason})"
    return f"Triton, in some layers torch ({reason})" if failures else "Triton"


def _is_fusible(layer: Any) -> bool:
    if type(layer) not in _LORA_LAYERS or type(layer.base_layer) not in _BASE_LAYERS:
        return False
    is_frozen = not any(parameter.requires_grad for parameter in layer.base_layer.parameters())
    return is_frozen and _fusible_adapter(layer) is not None


def _fused_forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # A compiler fuses the operations of peft, and has its own random numbers.
    adapter = None if args or kwargs or torch.compiler.is_compiling() else _fusible_adapter(layer)
    if adapter is None:
        result: torch.Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return result
    down, up, dropout = layer.lora_A[adapter], layer.lora_B[adapter], layer.lora_dropout[adapter]
    rate = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    result = _LoraLinear.apply(x, down.weight, up.weight, layer.base_layer, layer.scaling[adapter], rate)
    return result


def _fusible_adapter(layer: Any) -> str | None:
    """Return the adapter that is to be added to the base layer; None if peft has to compute the layer."""
    if layer.disable_adapters or layer.merged:
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant or layer.lora_bias[active[0]]:
        return None
    down, up = layer.lora_A[active[0]], layer.lora_B[active[0]]
    # A hook expects its module to be called, with a gradient.
    is_whole = not isinstance(down.weight, DTensor) and not any(
        _has_hooks(part) for part in (layer.base_layer, down, up)
    )
    return active[0] if is_whole else None


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class _LoraLinear(torch.autograd.Function):  # type: ignore[misc]
    """A frozen linear layer and its adapter: `base(x) + scaling * up(down(dropout(x)))`.

    Shapes: `x` (..., inputs), `down` (rank, inputs), `up` (outputs, rank), result (..., outputs). The adapter is
    computed in the data type of autocast, or without autocast in that of its weights; the result has that of `base(x)`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, base: Any, scaling: float, rate: float
    ) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else down.dtype
        result: torch.Tensor = base(x)
        ctx.base, ctx.scaling, ctx.rate, ctx.dtype = base, scaling, rate, dtype
        mask = seed = None
        ctx.products = triton_products(x, dtype, down.shape[0]) if rate else None
        # Autocast would cast the weights too, but remember copies without a gradient until it ends.
        if ctx.products is not None:
            seed = draw_seed(x.device)
            hidden = ctx.products.project(_flatten_rows(x), down.to(dtype), seed, rate)
        else:
            dropped = x.to(dtype)
            if rate:
                ctx.rng_state = _dropout_generator(x).get_state() if device in _REDRAWS_ON else None
                dropped, mask = _drop_values(dropped, rate)
            hidden = F.linear(_flatten_rows(dropped), down.to(dtype))
        total = _flatten_rows(result)
        if total.dtype == dtype:
            total.addmm_(hidden, up.to(dtype).t(), alpha=scaling)
        else:
            total += F.linear(hidden, up.to(dtype)) * scaling
        is_mask_kept = mask is not None and ctx.rng_state is None
        ctx.save_for_backward(x, down, up, hidden, mask if is_mask_kept else None, seed)
        return total.view(result.shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, down, up, hidden, mask, seed = ctx.saved_tensors
        needs_x, needs_down, needs_up, *_ = ctx.needs_input_grad
        total_grad = _flatten_rows(gradient)
        grad = total_grad.to(ctx.dtype)
        x_grad = down_grad = up_grad = None
        if needs_up:
            up_grad = (grad.t() @ hidden).to(up.dtype).mul_(ctx.scaling)
        hidden_grad = (grad @ up.to(ctx.dtype)).mul_(ctx.scaling)
        if seed is not None:
            if needs_down:
                down_grad = ctx.products.project_gradient(_flatten_rows(x), hidden_grad, seed, ctx.rate).to(down.dtype)
        else:
            dropped = x.to(ctx.dtype)
            if mask is not None:
                dropped = _apply_mask(dropped, mask, ctx.rate)
            elif ctx.rate:
                with _replaying_state(_dropout_generator(x), ctx.rng_state):
                    dropped, mask = _drop_values(dropped, ctx.rate)
            if needs_down:
                down_grad = (hidden_grad.t() @ _flatten_rows(dropped)).to(down.dtype)
            del dropped  # before the next tensor of its size
        if needs_x:
            base_grad = total_grad.to(_dtype_of_products(ctx.base, total_grad.dtype))
            x_grad = base_grad @ _base_weight(ctx.base, base_grad.dtype)
            if seed is not None:
                ctx.products.add_input_gradient(x_grad, hidden_grad, down.to(ctx.dtype), seed, ctx.rate)
            elif mask is None and x_grad.dtype == ctx.dtype:
                x_grad.addmm_(hidden_grad, down.to(ctx.dtype))
            else:
                adapter_grad = (hidden_grad @ down.to(ctx.dtype)).view(x.shape)
                if mask is not None:
                    adapter_grad = _apply_mask(adapter_grad, mask, ctx.rate)
                x_grad += _flatten_rows(adapter_grad)
            x_grad = x_grad.to(x.dtype).view(x.shape)
        return x_grad, down_grad, up_grad, None, None, None


def _flatten_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _drop_values(tensor: torch.Tensor, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor with values dropped, and the mask of those that stay; they are drawn in the order of memory."""
    dropped, mask = torch.native_dropout(tensor.contiguous(), rate, True)
    return dropped, mask


def _apply_mask(tensor: torch.Tensor, mask: torch.Tensor, rate: float) -> torch.Tensor:
    masked: torch.Tensor = torch.ops.aten.native_dropout_backward(tensor, mask, 1 / (1 - rate))
    return masked


def _dtype_of_products(base: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the data type in which a linear layer multiplies gradients of this type with its weight."""
    computes_in = base.compute_dtype if isinstance(base, Linear4bit) else None
    return computes_in or dtype


def _base_weight(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a linear layer (outputs, inputs), as the backward pass of its own operation has it."""
    if isinstance(base, Linear4bit):
        fix_4bit_weight_quant_state_from_module(base)  # a sharded model has gathered the weight without its state
        return dequantize_4bit(base.weight.data.view(-1, 1), base.weight.quant_state).to(dtype)
    if isinstance(base, Linear8bitLt):
        return base.state.CB.to(dtype, copy=True).mul_(base.state.SCB.unsqueeze(1).mul(1.0 / 127.0))
    weight: torch.Tensor = base.weight
    return weight.to(dtype)


def _dropout_generator(x: torch.Tensor) -> torch.Generator:
    """Return the generator of the random numbers of dropout on the device of `x`."""
    if x.is_cuda and torch.cuda.is_initialized():  # a simulated GPU has none
        generator: torch.Generator = torch.cuda.default_generators[x.device.index]
        return generator
    return torch.default_generator


@contextmanager
def _replaying_state(generator: torch.Generator, state: torch.Tensor) -> Iterator[None]:
    """During the block, the generator repeats what it drew from `state` on; afterwards it goes on from where it was."""
    current = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(current)
