"""Rules of the adapter's fields with each other, with the method and with the quantization of the base."""

from typing import Literal

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import field_error

CHANGES_BASE = ("pissa", "olora")
"""Initializations that subtract the adapter's first values from the base weights."""

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings")
"""Names of the input embeddings in the families of transformers."""


def adapter_conflicts(config: TrainingConfig) -> list[FieldError]:
    """Return conflicts of an adapter's fields; `config` trains one."""
    return [*_init_conflicts(config), *_place_conflicts(config)]


def _init_conflicts(config: TrainingConfig) -> list[FieldError]:
    method, init = METHODS[config.method], config.init_lora_weights
    bits = _quantized_bits(config)
    reasons = []
    if init in CHANGES_BASE:
        if bits is not None:
            reasons.append(
                f"changes the base weights, which cannot be done exactly in {bits} bits; use method `lora`, or set "
                "`load_in_4bit` to false"
            )
        if method.has_reference:
            reasons.append(
                f"changes the base weights, which method `{method.name}` compares the model with; leave it out"
            )
    if init in CHANGES_BASE and (embeddings := set(_EMBEDDINGS) & set(config.target_modules or ())):
        reasons.append(f"needs linear layers, and `target_modules` contains `{min(embeddings)}`; leave that out")
    if init == "loftq" and bits != 4:
        reasons.append("corrects the error of a base in 4 bits, and this base is not; use method `qlora`")
    if init == "loftq" and config.extra.get("model_factory") is not None:
        reasons.append("reads the weights in the base's files, and `extra.model_factory` makes the model; leave it out")
    if init in (*CHANGES_BASE, "loftq") and config.use_dora:
        reasons.append("cannot be used with `use_dora`, whose magnitudes are those of the base; leave one of them out")
    if init == "orthogonal" and config.lora_r is not None and config.lora_r % 2:
        reasons.append(f"needs an even `lora_r`, and it is {config.lora_r}")
    return [field_error("init_lora_weights", "conflict", f"is `{init}`, which {reason}") for reason in reasons]


def _quantized_bits(config: TrainingConfig) -> Literal[4, 8] | None:
    if METHODS[config.method].quantization == "forbidden":
        return None
    if config.load_in_8bit:
        return 8
    return 4 if config.load_in_4bit else None


def _place_conflicts(config: TrainingConfig) -> list[FieldError]:
    errors = []
    for name in ("layers_to_transform", "trainable_token_indices"):
        values = getattr(config, name) or []
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            errors.append(field_error(name, "conflict", f"contains {twice} twice; leave one of them out"))
    if both := set(config.target_modules or ()) & set(config.modules_to_save or ()):
        message = f"contains `{min(both)}`, which `target_modules` contains too; leave it out of one of them"
        errors.append(field_error("modules_to_save", "conflict", message))
    if config.trainable_token_indices is None:
        return errors
    for name in ("target_modules", "modules_to_save"):
        if embeddings := set(_EMBEDDINGS) & set(getattr(config, name) or ()):
            message = f"cannot be used while `{name}` contains `{min(embeddings)}`, which trains all tokens"
            errors.append(field_error("trainable_token_indices", "conflict", f"{message}; leave one of them out"))
    return errors
