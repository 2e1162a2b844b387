"""Tiled MLPs (`extra.tiled_mlp`): the MLP of a layer computes some tokens at a time, and again in the backward pass.

What it computes in between is several times as wide as its input, and then exists for one tile only. This pays for
sequences so long that one recomputed layer does not fit.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from worker.training.failures import TrainingFailure
from worker.training.model.experts import expert_modules

TILE = 4096
"""Tokens of a tile: enough to keep a GPU busy."""
_NAMES = ("mlp", "feed_forward")


def tile_mlps(model: PreTrainedModel, tile: int = TILE) -> None:
    """Let every MLP of a loaded model compute `tile` tokens at a time in training.

    Raises:
        TrainingFailure: `config_error`, if no layer has an MLP that treats tokens one by one.
    """
    mlps = list(_tileable_mlps(model))
    if not mlps:
        raise TrainingFailure(
            "config_error",
            "`extra.tiled_mlp` is set, but the layers of this model have no MLP that can be tiled; leave it out.",
        )
    for mlp in mlps:
        mlp.forward = partial(_compute_in_tiles, mlp.forward, mlp, tile)


def _tileable_mlps(model: PreTrainedModel) -> Iterator[Any]:
    for layer in model.modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for mlp in (getattr(layer, name, None) for name in _NAMES):
            # An MLP of experts sends tokens to them, and has more results than one.
            if mlp is not None and len(inspect.signature(mlp.forward).parameters) == 1 and not any(expert_modules(mlp)):
                yield mlp


def _compute_in_tiles(forward: Callable[[torch.Tensor], torch.Tensor], mlp: Any, tile: int, hidden: Any) -> Any:
    """Compute an MLP; `hidden` has the shape (sequences, positions, width)."""
    tokens = hidden.reshape(-1, hidden.shape[-1])
    if not (mlp.training and torch.is_grad_enabled()) or len(tokens) <= tile:
        return forward(hidden)
    tiles = [checkpoint(forward, part, use_reentrant=False) for part in tokens.split(tile)]
    return torch.cat(tiles).reshape(hidden.shape)
