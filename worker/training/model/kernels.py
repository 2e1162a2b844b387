"""Implementations that replace those of transformers, TRL and peft in a model that is about to be trained."""

import importlib.metadata
import logging
from typing import Any

from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from anneal.contracts.training_config.rules import DeviceCapabilities
from worker.training.failures import one_line
from worker.training.model.attention import batched_length
from worker.training.model.experts import expert_modules
from worker.training.model.frozen_head import use_two_products
from worker.training.model.fused_lora import dropout_kernels, fuse_lora_layers


def has_liger(machine: DeviceCapabilities) -> bool:
    """Return True if Liger is installed and the machine can use it."""
    return machine.kind == "cuda" and bool(is_liger_kernel_available())


def use_liger(network: Any, machine: DeviceCapabilities) -> None:
    """Replace norms, rotary embeddings and gated layers of a loaded model, if Liger is installed and has its family.

    The reference passes of a run compute with them too, so this comes before the trainer is created.
    """
    if has_liger(machine):
        network.norms_kernel = _use_liger(network)


def _use_liger(network: Any) -> str:
    kind = network.config.model_type
    # Experts stay: adapters of experts and their division among devices use the modules of transformers.
    parts = {"rope": True, "rms_norm": True, "swiglu": not any(expert_modules(network))}
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            return f"transformers (liger-kernel does not have {kind})"
        # Each run would name the kernels of other vendors' devices as missing.
        logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
        # The head of TRL computes the loss, without logits.
        apply_liger_kernel(network, {**parts, "cross_entropy": False, "fused_linear_cross_entropy": False})
    except (ImportError, OSError, TypeError, ValueError, AttributeError) as error:
        # A package for another triton, or one that does not know this class of the family.
        return f"transformers (liger-kernel cannot be used: {one_line(error)})"
    return f"liger-kernel {importlib.metadata.version('liger-kernel')}"


def use_kernels(model: Any, *, is_half: bool = True, is_compiled: bool = False) -> dict[str, str]:
    """Replace LoRA layers and a frozen head of a model with its adapter, and return what computes each part.

    Keys: `lora`, `dropout` (of fused LoRA layers), `head` and `norms` (also rotary embeddings and gated layers), each
    if the model has the part, and `attention` if texts of a certain length are computed by another kernel than those of
    other lengths. `is_half` says that the run computes in 16 bits, `is_compiled` that its layers will be compiled.
    """
    used = {"norms": getattr(model, "norms_kernel", "transformers")}
    if (lora := fuse_lora_layers(model)) is not None:
        used["lora"] = "peft, compiled" if is_compiled else lora
    if not is_compiled and (dropout := dropout_kernels(model, is_half=is_half)) is not None:
        used["dropout"] = dropout
    if (head := model.get_output_embeddings()) is not None:
        use_two_products()
        is_trained = any(parameter.requires_grad for parameter in head.parameters())
        used["head"] = "trl" if is_trained else "two products"
    if (length := batched_length()) is not None:
        used["attention"] = f"varlen (cudnn for texts of {length} tokens)"
    return used
