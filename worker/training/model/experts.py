"""Experts of a model: modules of transformers whose parameters are stacked by expert."""

from collections.abc import Iterator
from typing import Any

from worker.training.model.checked_weights import load_pretrained

_MARK = "_is_expert_parallel"
"""Attribute that transformers gives such modules."""


def expert_modules(model: Any) -> Iterator[Any]:
    """Yield the modules with the experts of each layer."""
    return (module for module in model.modules() if hasattr(module, _MARK))


def load_experts(model: Any, checkpoint: str) -> None:
    """Load the weights of a model with experts from a checkpoint; nothing to do for other models.

    Files have a tensor for each expert, which `from_pretrained` stacks and the trainer of transformers skips.
    """
    if any(expert_modules(model)):
        saved = load_pretrained(type(model), checkpoint, "The checkpoint", dtype=model.dtype)
        model.load_state_dict(saved.state_dict())
