"""Implementations that replace those of transformers, TRL and peft in a model that is about to be trained."""

import importlib.metadata
from typing import Any

from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from app.contracts.training_config.rules import DeviceCapabilities
from worker.training.failures import one_line
from worker.training.model.experts import expert_modules
from worker.training.model.frozen_head import use_two_products
from worker.training.model.fused_lora import fuse_lora_layers


def use_kernels(model: Any, machine: DeviceCapabilities) -> dict[str, str]:
    """Replace what has a faster implementation of the same computation, and return what computes each part.

    Keys: `lora`, `head` and `norms` (also rotary embeddings and gated layers), each if the model has the part.
    """
    used = {"norms": _use_liger(model) if machine.kind == "cuda" else "transformers"}
    if (lora := fuse_lora_layers(model)) is not None:
        used["lora"] = lora
    if (head := model.get_output_embeddings()) is not None:
        use_two_products()
        is_trained = any(parameter.requires_grad for parameter in head.parameters())
        used["head"] = "trl" if is_trained else "two products"
    return used


def _use_liger(model: Any) -> str:
    """Replace norms, rotary embeddings and gated layers by those of Liger if it is installed and has the family."""
    if not is_liger_kernel_available():
        return "transformers"
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except (ImportError, OSError) as error:
        return f"transformers (liger-kernel cannot be imported: {one_line(error)})"
    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"transformers (liger-kernel does not have {model.config.model_type})"
    # Experts stay: adapters of experts and their division among devices use the modules of transformers.
    has_experts = any(expert_modules(model))
    parts = {"rope": True, "rms_norm": True, "swiglu": not has_experts}
    # The head of TRL computes the loss, without logits.
    apply_liger_kernel(model, {**parts, "cross_entropy": False, "fused_linear_cross_entropy": False})
    return f"liger-kernel {importlib.metadata.version('liger-kernel')}"
