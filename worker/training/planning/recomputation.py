"""Layers whose activations are recomputed in the backward pass.

The first layers, those next to the input, are recomputed. Any choice of as many layers keeps the same bytes at the end
of the forward pass. The backward pass begins at the last layer: by the time it recomputes one of the first layers, the
kept activations of all later ones are freed, while the gradients of the later layers already exist. So its peak is no
higher than with recomputed layers that are spread evenly, and lower than with the last ones.
"""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer


class Recomputation:
    """Controls which layers of a model are recomputed, by whatever call activation checkpointing is enabled.

    Trainers of TRL disable it for their reference and enable it again for all layers. Each layer that keeps its
    activations therefore turns it off for itself before it computes.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        self._keeps: list[RemovableHandle] = []
        self._is_enabled = False

    @property
    def layers(self) -> int:
        """Number of layers that can be recomputed one by one; 1 for a model that recomputes everything or nothing."""
        return max(len(self._layers), 1)

    def layers_of(self, value: bool | str) -> int:
        """Return the number of recomputed layers that a value of `gradient_checkpointing` means."""
        return -(-self.layers // 2) if value == "selective" else self.layers if value else 0

    def recompute_first(self, count: int) -> None:
        """Recompute the first `count` layers from now on, and keep the activations of the others."""
        for keeps in self._keeps:
            keeps.remove()
        self._keeps = []
        if self._is_enabled:
            self._model.activation_checkpointing_disable()
            self._model.disable_input_require_grads()
        self._is_enabled = count > 0
        if not self._is_enabled:
            return
        self._model.activation_checkpointing_enable()
        for layer in self._layers[count:]:
            layer.gradient_checkpointing = False
            self._keeps.append(layer.register_forward_pre_hook(_keep_activations))


def _keep_activations(layer: nn.Module, _: Any) -> None:
    layer.gradient_checkpointing = False
