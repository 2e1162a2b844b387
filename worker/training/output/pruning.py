"""Magnitude pruning of an output: the smallest weights of each linear layer become zero."""

from typing import Any

from torch import nn
from torch.nn.utils import prune

from worker.wire.heartbeat import HeartbeatCallback


def prune_smallest(network: Any, fraction: float, alive: HeartbeatCallback) -> tuple[int, int]:
    """Set this fraction of each linear layer's weights to zero, those of the smallest magnitude, in place.

    The layer that computes the logits keeps its weights, and so do embeddings and norms. `alive` is called for each
    layer.

    Returns:
        The number of zeros in the pruned layers, and the number of their weights.
    """
    zeros = weights = 0
    head = network.get_output_embeddings()
    for layer in [module for module in network.modules() if isinstance(module, nn.Linear) and module is not head]:
        prune.l1_unstructured(layer, "weight", fraction)
        prune.remove(layer, "weight")  # the mask becomes part of the weights
        zeros += int((layer.weight == 0).sum())
        weights += layer.weight.numel()
        alive()
    return zeros, weights
