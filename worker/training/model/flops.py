"""Operations (FLOPs) per training token, counted from the modules of the loaded model.

Conventions, those of PaLM (https://arxiv.org/abs/2204.02311, appendix B) and Megatron-LM
(https://arxiv.org/abs/2104.04473):

- A product with a weight is 2 operations forward, 2 backward to its input if gradients propagate further, and 2
  backward to the weight if it is trained. Embeddings are lookups and cost nothing. Of the experts, only those count
  that a token is routed to. A quantized weight counts by its true shape; dequantization is not counted.
- Attention is 2 products of 2 operations for each pair of tokens of a sequence, and twice that backward. The causal
  half is not subtracted, nor are pairs outside a sliding window; layers of linear attention have no pairs.
- The head counts for every token, although some kernels skip masked tokens.
- Recomputation in the backward pass (`gradient_checkpointing`) counts for the hardware, not for MFU.
- A reference model that runs in every step counts its forward pass. Generation, reward models and reference
  log-probabilities computed once beforehand do not count: they are not operations of a training token.
- Norms, activations, the optimizer, and what DoRA computes once per batch do not count: they are not products per
  token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")
_LAYERS = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that multiply each token with their weights; layers of bitsandbytes are subclasses of `nn.Linear`."""


@dataclass(frozen=True)
class Flops:
    """Operations of training: per token, and per pair of tokens of a sequence (its length squared)."""

    token: int
    """Forward and backward products with weights, per token."""
    pair: int
    """Forward and backward attention of all layers, per pair."""
    token_again: int = 0
    """Recomputed in the backward pass, per token."""
    pair_again: int = 0

    def of(self, tokens: float, pairs: float) -> float:
        """Return the operations of training on so many tokens and pairs, from which MFU is computed."""
        return tokens * self.token + pairs * self.pair

    def per_token(self, length: float) -> int:
        """Return the operations per token in a sequence of `length` tokens."""
        return round(self.token + length * self.pair)

    def per_token_of_hardware(self, length: float) -> int:
        """Return the same including recomputation."""
        return round(self.token + self.token_again + length * (self.pair + self.pair_again))


@dataclass(frozen=True)
class _Product:
    """A weight matrix that each token is multiplied with."""

    weights: float
    trains: bool
    input_needs_gradient: bool
    of_base: bool = True
    """False for an adapter, which the reference pass leaves out."""
    of_head: bool = False

    @property
    def backward(self) -> float:
        return 2 * self.weights * (self.trains + self.input_needs_gradient)


def count(model: nn.Module, *, checkpointing: bool = False, reference: bool = False) -> Flops:
    """Count the operations per training token of `model` as it is set up now (adapters, trained parameters).

    `checkpointing`: activations are recomputed in the backward pass. `reference`: the base model also runs forward.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    walk = _Walk(model, text)
    products = list(walk.products())
    forward = sum(2 * one.weights for one in products)
    backward = sum(one.backward for one in products)
    layers, each = _attention(text)
    trained = layers - walk.frozen_attention if any(one.trains for one in products if not one.of_head) else 0
    token, pair = forward + backward, each * (layers + 2 * trained)
    if reference:
        token += sum(2 * one.weights for one in products if one.of_base)
        pair += each * layers
    again = sum(2 * one.weights for one in products if not one.of_head) if checkpointing and trained else 0
    return Flops(round(token), pair, round(again), each * layers if again else 0)


def _attention(config: Any) -> tuple[int, int]:
    """Return the number of attention layers, and the forward operations of one layer per pair of tokens."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0, 0
    if not isinstance(heads, int):
        return 0, 0  # the number of heads differs between layers, in a way that only the model's code knows
    width = (getattr(config, "head_dim", None) or config.hidden_size // heads) * heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum("linear" not in kind and "mamba" not in kind and kind != "conv" for kind in kinds), 4 * int(width)


class _Walk:
    """Walk through the modules in the order of their definition, which is that of the forward pass.

    Modules of one parent that multiply with weights form a block: the input of the last one (the output of attention
    or of an MLP) is the output of the others, and their input is the input of the block.
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        self._model = model
        self._head = _output_layer(model)
        # Activation checkpointing makes the gradient flow to the embeddings, even if they are frozen.
        self._gradient_from_start = bool(getattr(_innermost(model), "_require_grads_hooks", None))
        self._gradient = False
        self.frozen_attention = 0
        """Number of layers whose attention has no backward pass, because nothing below it is trained."""
        self._experts = next((getattr(config, name) for name in _EXPERTS_OF_A_TOKEN if hasattr(config, name)), None)

    def products(self) -> Iterator[_Product]:
        yield from self._below(self._model)

    def _below(self, module: nn.Module) -> Iterator[_Product]:
        children = [_in_use(child) for child in module.children()]
        block = [child for child in children if isinstance(child, LoraLayer) or _multiplies(child)]
        into_block = self._gradient
        for child in children:
            if not block or child is block[0]:
                into_block = self._gradient
            needed = into_block
            if block and child is block[-1]:
                needed = self._gradient
                self.frozen_attention += not needed and "Attention" in type(module).__name__
            if isinstance(child, nn.Embedding):
                self._gradient |= self._gradient_from_start or _trains(child)
            elif isinstance(child, LoraLayer):
                yield from self._adapted(child, needed)
            elif _multiplies(child):
                yield self._product(child, needed)
            else:
                yield from self._own(child)
                yield from self._below(child)

    def _own(self, module: nn.Module) -> Iterator[_Product]:
        """Yield weights that are not in a layer of their own: those of experts and of their routers."""
        needed = self._gradient
        for parameter in module.parameters(recurse=False):
            if parameter.dim() in (2, 3):
                share = 1.0
                if parameter.dim() == 3 and self._experts:
                    share = min(1.0, self._experts / parameter.shape[0])
                yield _Product(parameter.numel() * share, parameter.requires_grad, needed)
            self._gradient |= parameter.requires_grad

    def _adapted(self, layer: LoraLayer, needed: bool) -> Iterator[_Product]:
        base = layer.get_base_layer()
        if not _multiplies(base):  # an embedding
            self._gradient |= self._gradient_from_start or _trains(layer)
            return
        yield self._product(base, needed)
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                down, up = layer.lora_A[adapter], layer.lora_B[adapter]
                yield _Product(down.weight.numel(), _trains(down), needed, of_base=False)
                yield _Product(up.weight.numel(), _trains(up), needed or _trains(down), of_base=False)
        self._gradient |= _trains(layer)

    def _product(self, layer: Any, needed: bool) -> _Product:
        # A 4-bit weight packs two values in a byte, so its shape is not that of the layer.
        weights = layer.in_features * layer.out_features if isinstance(layer, nn.Linear) else layer.weight.numel()
        trains = layer.weight.requires_grad
        self._gradient |= _trains(layer)
        return _Product(weights, trains, needed, of_head=layer is self._head)


def _in_use(module: nn.Module) -> Any:
    """Return the module that computes: for one in `modules_to_save`, its trained copy."""
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[module.active_adapters[0]]
    return module


def _multiplies(module: nn.Module) -> bool:
    return isinstance(module, _LAYERS)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _innermost(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _output_layer(model: Any) -> Any:
    """Return the output layer, which is not recomputed in the backward pass."""
    inner = _innermost(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    found = head if head is not None else getattr(inner, "score", None)
    return _in_use(found) if isinstance(found, nn.Module) else None


def token_pairs(inputs: Any) -> torch.Tensor | float:
    """Return the pairs of tokens in a model's input batch: the sum of squared sequence lengths, without padding.

    The result is a scalar on the device of the batch, because reading it would block the host.
    """
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is None and "completion_mask" in inputs:
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    if positions is not None:  # packed: n² is the sum of the first n odd numbers
        return (2 * positions.double() + 1).sum()
    return mask.sum(-1).double().square().sum() if mask is not None else 0.0
