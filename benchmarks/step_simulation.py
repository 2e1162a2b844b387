"""A training step of a full-size model on fake CUDA tensors: the bytes that it allocates, without a GPU.

The model, its adapter, its loss head and its optimizer are those of a worker. torch runs every operation on tensors
that have a shape, a type and a device but no data, and chooses the operations as on a GPU. Only kernels that exist on a
GPU alone are replaced; each is given the memory that its source allocates.
"""

import ctypes
import heapq
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from bitsandbytes.functional import name2qmap, quantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BitsAndBytesConfig, masking_utils
from transformers.initialization import no_init_weights
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator.activations import Checkpointing, recomputed_layers
from app.estimator.forward_pass import Attention, Batch
from worker.training.model import attention, fused_lora, kernels, loader
from worker.training.model.dropout.products import TritonProducts
from worker.training.planning.recomputation import Recomputation

GPU = loader.DeviceCapabilities(kind="cuda", bf16=True)
"""The simulated device, without flash-attn."""
aten = torch.ops.aten
_MAX_FLASH_HEAD_WIDTH = 256


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flash_backward_workspace(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> int:
    """FlashAttention-2: a 32-bit query gradient, a row sum per head, and key and value gradients of all query heads."""
    rows = query.numel() // query.shape[-1]
    shared = 2 * query.numel() * query.element_size() if key.shape[1] != query.shape[1] else 0
    return query.numel() * 4 + rows * 4 + shared


def _dequantized(value: torch.Tensor, _: torch.Tensor, shape: list[int], *__: Any, **___: Any) -> int:
    """bitsandbytes dequantizes the whole matrix if it has to multiply more than a few rows."""
    return shape[0] * shape[1] * value.element_size()


WORKSPACES: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward_workspace,
    torch.ops.torch_attn._varlen_attn_backward.default: _flash_backward_workspace,
    torch.ops.bitsandbytes.gemm_4bit.default: _dequantized,
}
"""Bytes that a CUDA kernel allocates for its own duration, by operation."""


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Use the kernel that `scaled_dot_product_attention` uses on a GPU, between which a CPU build cannot choose."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value))
    if attn_mask is None and query.shape[-1] <= _MAX_FLASH_HEAD_WIDTH:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, torch.full((), -math.inf, dtype=query.dtype, device=query.device))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad or key.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of the storages on the fake device that are alive, and their highest number.

    `has_mask`: a sequence is padded, or has several texts.
    """

    def __init__(self, *, has_mask: bool = False) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.peak_operation = ""
        self._has_mask = has_mask
        self._storages: dict[int, weakref.ref[Any]] = {}

    def reset_peak(self) -> None:
        """Forget the highest number so far."""
        self.peak = self.current

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            self.current -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, freed)
        self.current += size

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is aten._local_scalar_dense.default:
            # The model asks whether a mask is all ones, and whether positions start again.
            return not self._has_mask if args[0].dtype is torch.bool else 0
        if operation is aten.index.Tensor and args[1][0].dtype is torch.bool:
            # The head takes the positions that have a target, which are all of them.
            source, mask = args[0], args[1][0]
            result = source.new_empty((mask.numel(), *source.shape[mask.dim() :]))
        else:
            result = operation(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                self.add(leaf)
        workspace = WORKSPACES[operation](*args, **kwargs) if operation in WORKSPACES else 0
        if self.current + workspace > self.peak:
            self.peak = self.current + workspace
            self.peak_operation = str(operation)
        return result


class _NoKernel:
    """Stands in for a Triton kernel, which writes into tensors that it is given."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


_NO_PRODUCTS = SimpleNamespace(project=_NoKernel(), project_gradient=_NoKernel(), add_input_gradient=_NoKernel())
_CPU, _CUDA, _DEVICE_TYPES = 0, 1, 24


@contextmanager
def _cuda_device_guard() -> Iterator[None]:
    """Let a build of torch without CUDA index fake CUDA tensors: the guard of the CPU, which does nothing, serves both.

    `FakeTensorMode` does the same in a build with CUDA on a machine without a GPU.
    """
    libraries = Path(torch.__file__).parent / "lib"
    library = ctypes.CDLL(str(next(libraries.glob("libc10.*"))))
    guards = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    guards[_CUDA] = before or guards[_CPU]
    try:
        yield
    finally:
        guards[_CUDA] = before


@contextmanager
def _cuda_kernels() -> Iterator[None]:
    """Declare the kernel of a GPU for an operation that a build without CUDA would compose of others."""
    name = "silu_backward"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
        yield
        return
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl(name, lambda gradient, _: torch.empty_like(gradient))
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let torch and TRL choose what they choose on a GPU, for fake CUDA tensors of a build without CUDA."""
    with ExitStack() as stack:
        stack.enter_context(_cuda_device_guard())
        stack.enter_context(_cuda_kernels())
        for module, name, value in (
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
            # Masks are made as from real tensors, which `AllocatedBytes` answers for.
            (masking_utils, "is_tracing", lambda *_: False),
            (torch.nn.functional, "scaled_dot_product_attention", _attention),
            (attention, "_kernel_works", lambda _: True),
            (attention, "_repeats_keys", lambda _: False),
            (chunked_logprob, "_TRITON_AVAILABLE", True),
            (chunked_logprob, "_forward_kernel", _NoKernel()),
            (chunked_logprob, "_backward_kernel", _NoKernel()),
            (chunked_logprob, "triton", SimpleNamespace(cdiv=lambda size, block: -(-size // block))),
            # Adds to a 32-bit tensor in place.
            (chunked_logprob, "_addmm_fp32", lambda *_: None),
            (fused_lora, "triton_products", lambda *_: TritonProducts(_NO_PRODUCTS)),
            # Recomputation is done once for each backward pass, which is not one of torch's engine.
            (torch._C, "_current_graph_task_id", lambda: 1),
            # Fake parameters cannot be moved in place; all are created on the device.
            (torch.nn.Module, "to", lambda module, *_, **__: module),
        ):
            stack.enter_context(mock.patch.object(module, name, value, create=name == "triton"))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.dict(name2qmap, dynamic=torch.empty(256, device="cuda")))
        yield


def backward(losses: list[torch.Tensor]) -> None:
    """Remove the loss from the list and compute gradients, without the threads and streams that torch's engine needs.

    The order is that of the engine. A node is freed with the tensors that it saved once nothing refers to it, so the
    caller may hold no reference to the loss.
    """
    loss = losses.pop()
    with torch.no_grad():
        gradients: dict[int, list[torch.Tensor | None]] = {_key(loss.grad_fn): [torch.ones_like(loss)]}
        ready, uses = [(-_key(loss.grad_fn), loss.grad_fn)], _uses(loss.grad_fn)
        del loss
        _run(ready, uses, gradients)


def _uses(root: Any) -> dict[int, int]:
    """Return the number of nodes that each node receives gradients from."""
    uses: dict[int, int] = {}
    to_visit = [root]
    while to_visit:
        node = to_visit.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            key = _key(following)
            if key not in uses:
                to_visit.append(following)
            uses[key] = uses.get(key, 0) + 1
    return uses


def _run(ready: list[tuple[int, Any]], uses: dict[int, int], gradients: dict[int, list[torch.Tensor | None]]) -> None:
    while ready:
        key, node = heapq.heappop(ready)
        inputs = gradients.pop(-key)
        if hasattr(node, "variable"):
            _accumulate(node.variable, inputs)
            continue
        inputs += [None] * (len(node._input_metadata) - len(inputs))
        results = node.apply(*inputs) if isinstance(node, torch.autograd.function.BackwardCFunction) else node(*inputs)
        results = list(results) if isinstance(results, tuple) else [results]
        del inputs
        edges = node.next_functions
        del node
        for following, index in edges:
            gradient = results.pop(0)
            if following is None:
                continue
            key = _key(following)
            slots = gradients.setdefault(key, [])
            slots += [None] * (index + 1 - len(slots))
            slots[index] = _sum(slots, index, _as_expected(gradient, following, index))
            del gradient
            uses[key] -= 1
            if uses[key] == 0:
                heapq.heappush(ready, (-key, following))
        del edges, following, slots, results


_FIRST = 2**62
"""Order of leaves, whose gradients are stored as soon as they are known."""


def _key(node: Any) -> int:
    number: int = node._sequence_nr()
    return number if number < _FIRST else _FIRST + id(node.variable)


def _as_expected(gradient: torch.Tensor | None, node: Any, index: int) -> torch.Tensor | None:
    """Return the gradient in the shape and type that a node expects: operations leave broadcasting to the engine."""
    if gradient is None:
        return None
    expected = node._input_metadata[index]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    return gradient.to(expected.dtype)


def _sum(slots: list[torch.Tensor | None], index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    before = slots[index]
    slots[index] = None
    if before is None or gradient is None:
        return before if gradient is None else gradient
    # In place where nothing else has the tensor's storage, as the engine does: here, this storage and its wrapper.
    if torch._C._storage_Use_Count(before.untyped_storage()._cdata) <= 2:
        return before.add_(gradient)
    return before + gradient


def _accumulate(parameter: torch.Tensor, gradients: list[torch.Tensor | None]) -> None:
    gradient = gradients.pop()
    if parameter.grad is None:
        parameter.grad = gradient
    elif gradient is not None:
        parameter.grad += gradient


@dataclass(frozen=True)
class Step:
    """Bytes of one training step."""

    kept_bytes: int
    """Bytes kept for the backward pass."""
    peak: int
    """Highest bytes, with weights, gradients and the state of the optimizer."""
    peak_operation: str


def build(described: Mapping[str, Any], config: TrainingConfig, attention: Attention) -> Any:
    """Build a model with its adapter as a worker does; call in `fake_gpu`."""
    warnings.simplefilter("ignore")
    fields = {name: value for name, value in described.items() if name != "model_type"}
    architecture = CONFIG_MAPPING[described["model_type"]](**fields)
    dtype = loader.weights_dtype(config, GPU)
    with torch.device("cuda"), no_init_weights():
        model = AutoModelForCausalLM.from_config(architecture, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    if config.load_in_4bit:
        _quantize(model, config, dtype)
    network = model
    adapter = loader.lora_config(config)
    if adapter is not None:
        with torch.device("cuda"), no_init_weights():
            model = get_peft_model(model, adapter)
    loader.keep_full_precision(model)
    add_fused_lm_head(network, outputs=("log_probs", "entropy", "is_top1"))
    kernels.use_kernels(model)
    model.train()
    return model


def _quantize(model: Any, config: TrainingConfig, dtype: torch.dtype) -> None:
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=config.bnb_4bit_quant_type, bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=config.trainer_options.double_quant,
    )  # fmt: skip
    with unset_fake_temporarily():  # its weights are of a class that cannot be fake
        replace_with_bnb_linear(model, ["lm_head"], settings)
    for module in model.modules():
        if not isinstance(module, Linear4bit):
            continue
        whole = torch.empty(module.out_features, module.in_features, dtype=dtype, device="cuda")
        packed, state = quantize_4bit(
            whole, blocksize=64, compress_statistics=config.trainer_options.double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )  # fmt: skip
        weight = torch.nn.Parameter(packed, requires_grad=False)
        weight.quant_state, weight.compress_statistics = state, config.trainer_options.double_quant
        weight.quant_type = config.bnb_4bit_quant_type
        module.weight = weight
        if module.bias is not None:
            module.bias = torch.nn.Parameter(torch.empty(module.out_features, dtype=dtype, device="cuda"), False)
    model.is_loaded_in_4bit = True


def run_step(model: Any, config: TrainingConfig, batch: Batch, checkpointing: Checkpointing | int) -> Step:
    """Run a step of the optimizer that is not its first; of several micro-batches, the last."""
    recomputation = Recomputation(model)
    recomputation.recompute_first(recomputed_layers(checkpointing, recomputation.layers))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _optimizer(config, trained)
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    if config.gradient_accumulation_steps == 1:
        optimizer.zero_grad()
    ids = torch.ones(batch.sequences, batch.length, dtype=torch.long, device="cuda")
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if batch.positions_each:
        inputs["position_ids"] = torch.ones_like(ids)
    elif batch.masked:
        inputs["attention_mask"] = torch.ones_like(ids)
    states = (part for state in optimizer.state.values() for part in state.values() if torch.is_tensor(part))
    gradients = (parameter.grad for parameter in trained if parameter.grad is not None)
    borders = tuple(range(0, batch.length + 1, batch.length // batch.texts))
    texts = attention.Texts(borders, torch.empty(len(borders), dtype=torch.int32, device="cuda"), borders[1], None)
    with (
        mock.patch.object(attention, "_texts_of_mask", lambda *_: texts),
        AllocatedBytes(has_mask=batch.masked or batch.texts > 1) as allocated,
    ):
        for tensor in (*_tensors(model), *states, *gradients):
            allocated.add(tensor)
        before = allocated.current
        with torch.autocast("cuda", torch.bfloat16):
            losses = [model(**inputs, fused_lm_head=True).loss]
        kept_bytes = allocated.current - before
        backward(losses)
        optimizer.step()
    optimizer.zero_grad()
    return Step(kept_bytes, allocated.peak, allocated.peak_operation)


def _optimizer(config: TrainingConfig, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    if config.optim != "adamw_torch_fused":
        raise ValueError(f"The optimizer {config.optim} is not simulated: set `optim: adamw_torch_fused`.")
    return torch.optim.AdamW(parameters, fused=True)


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a loaded model, with the constants of quantized weights."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        if isinstance(module, Linear4bit):
            state = module.weight.quant_state
            yield from (state.absmax, state.code)
            if state.nested:
                yield from (state.state2.absmax, state.state2.code, state.offset)
