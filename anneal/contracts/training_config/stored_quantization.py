"""Base models whose files are quantized: which can be trained, and with which configuration.

A quantized model on disk has a `quantization_config` in its config.json, which decides how transformers loads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import method_of
from anneal.contracts.training_config.field_traits import FOUR_BIT_ONLY
from anneal.contracts.training_config.raw_config import given_fields
from anneal.contracts.training_config.rules import field_error

_BITSANDBYTES = "bitsandbytes"
_DEQUANTIZED = ("mxfp4",)
_QUANT_TYPE = "bnb_4bit_quant_type"
_DOUBLE_QUANT = "extra.double_quant"


@dataclass(frozen=True)
class StoredQuantization:
    """Quantization of the weights in a model's files."""

    method: str
    """As transformers names it: `bitsandbytes`, `gptq`, `awq`, `fp8` …"""
    bits: int | None = None
    """4 or 8 with `bitsandbytes`, whose weights stay quantized; None with any other method."""
    quant_type: str | None = None
    """Data type of 4-bit weights: `nf4` or `fp4`."""
    double_quant: bool = False
    """True if the constants of 4-bit weights are quantized too."""

    @property
    def is_dequantized(self) -> bool:
        """True if the weights are dequantized when they are loaded, and then are those of any other model."""
        return self.method in _DEQUANTIZED

    @property
    def is_supported(self) -> bool:
        """True if the model can be loaded, trained or merged."""
        return self.bits is not None or self.is_dequantized

    @property
    def text(self) -> str:
        """Description for users, which follows "stored"."""
        return f"in {self.bits} bits (`{self.method}`)" if self.bits else f"quantized with `{self.method[:40]}`"


def stored_quantization(model_config: Mapping[str, Any]) -> StoredQuantization | None:
    """Return the quantization that a model's config.json describes; None if its weights are not quantized."""
    text_config = model_config.get("text_config")
    described = model_config.get("quantization_config") or (
        text_config.get("quantization_config") if isinstance(text_config, Mapping) else None
    )
    if not isinstance(described, Mapping) or not described:
        return None
    method = described.get("quant_method")
    bits = 4 if described.get("load_in_4bit") else 8 if described.get("load_in_8bit") else None
    if bits is None:
        # With neither, transformers loads a model of bitsandbytes as one that is not quantized.
        return None if method == _BITSANDBYTES else StoredQuantization(str(method or "an unknown method"))
    quant_type = str(described.get(_QUANT_TYPE) or "fp4") if bits == 4 else None
    return StoredQuantization(
        _BITSANDBYTES, bits, quant_type, bits == 4 and bool(described.get("bnb_4bit_use_double_quant"))
    )


def stored_quantization_conflicts(
    stored: StoredQuantization | None, config: Mapping[str, Any], *, trains: bool = True
) -> list[FieldError]:
    """Return the fields of a configuration, as the user wrote it, that the weights in the base's files contradict.

    Without `trains`, the model is only evaluated, for which its weights may be dequantized.
    """
    if stored is None:
        return []
    otherwise = "name the model from which it was quantized"
    method = method_of(config)
    if stored.is_supported and config.get("init_lora_weights") == "loftq":
        why = f"needs weights that are not quantized, and the base model is stored {stored.text}"
        return [field_error("init_lora_weights", "conflict", f"is `loftq`, which {why}; leave it out, or {otherwise}")]
    if stored.is_dequantized:
        why = f"the base model is stored {stored.text}, and cannot be quantized again when it is loaded"
        if method.quantization == "required":
            return [field_error("method", "conflict", f"is `{method.name}`, but {why}; use `lora`")]
        if config.get("load_in_8bit") is True:
            return [field_error("load_in_8bit", "conflict", f"is true, but {why}; leave it out")]
        return []
    if not stored.is_supported:
        why = f"is stored {stored.text}, which cannot be trained or merged here"
        return [field_error("base_model", "conflict", f"{why}; {otherwise}")]
    is_stored = f"the base model is stored {stored.text}"
    if method.quantization == "forbidden":
        message = f"is `{method.name}`, which needs a base model that is not quantized, and {is_stored}; use `qlora`"
        return [field_error("method", "conflict", f"{message}, or {otherwise}")] if trains else []
    if config.get("lora_r", 1) is None:
        message = f"is null, which trains all weights, and {is_stored}; leave it out to train an adapter"
        return [field_error("lora_r", "conflict", f"{message}, or {otherwise}")] if trains else []
    named, errors = given_fields(config), []
    if stored.bits == 4 and config.get("load_in_8bit") is True:
        errors.append(
            field_error("load_in_8bit", "conflict", f"is true, but {is_stored}; leave it out, or {otherwise}")
        )
    elif "load_in_4bit" in named and config.get("load_in_4bit") is False and config.get("load_in_8bit") is not True:
        errors.append(
            field_error("load_in_4bit", "conflict", f"is false, but {is_stored}; leave it out, or {otherwise}")
        )
    if stored.bits == 8:
        message = f"applies only to a 4-bit base model, and {is_stored}; leave it out"
        return errors + [field_error(name, "conflict", message) for name in FOUR_BIT_ONLY if name in named]
    if _QUANT_TYPE in named and config.get(_QUANT_TYPE) != stored.quant_type:
        message = f"must be `{stored.quant_type}`, the type of the weights in the files of the base model; leave it out"
        errors.append(field_error(_QUANT_TYPE, "conflict", message))
    if _DOUBLE_QUANT in named and stored.double_quant:  # named, so it is false
        message = "must be true, as in the files of the base model; leave it out"
        errors.append(field_error(_DOUBLE_QUANT, "conflict", message))
    return errors
