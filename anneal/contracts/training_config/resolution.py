"""Resolution of a configuration for a device: effective values and replacements."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import DType, LossOn, TrainingConfig
from anneal.contracts.training_config.optimizers import DEFAULT_STOCHASTIC_OPTIMIZER, OPTIMIZERS, SHARDED_OPTIMIZERS
from anneal.contracts.training_config.rules import (
    DeviceCapabilities,
    default_dtype,
    machine_conflicts,
    method_conflicts,
    wants_adapter,
)
from anneal.contracts.training_config.stored_quantization import StoredQuantization

LONGEST_SEQUENCE = 1_000_000
"""Maximum sequence length of a model whose tokenizer sets none, or a larger one."""


class Replacement(BaseModel):
    """A default that this machine does not support, and the value used instead."""

    field: str
    requested: Any
    used: Any
    reason: str


@dataclass(frozen=True)
class Effective:
    """A configuration with all defaults resolved."""

    config: TrainingConfig
    replaced: list[Replacement]
    problems: list[FieldError]


def resolve_config(
    config: TrainingConfig,
    user_set_fields: Iterable[str],
    machine: DeviceCapabilities | None,
    longest_sequence: int | None = None,
    *,
    sharded: bool = False,
    dataset_format: str | None = None,
    stored: StoredQuantization | None = None,
) -> Effective:
    """Resolve all defaults; a value that was set by the user and is not supported is an error.

    Defaults that follow from the method are resolved silently, as documented with the fields. A default that machine
    or model do not support is replaced by the nearest that works, and reported; `machine` and `longest_sequence`, the
    model's limit in tokens, may be None: those defaults stay. The model of a `sharded` run is divided among its
    devices. `dataset_format` is that of the training data; with None, the defaults that follow from it stay. `stored`
    is the quantization of the weights in the model's files, with which the configuration has no conflicts.
    """
    user_set_fields = set(user_set_fields)
    config, as_stored = match_stored_quantization(config, stored)
    update: dict[str, Any] = {}
    adapter = wants_adapter(config)
    if not adapter:
        update["lora_r"] = None
    if "load_in_4bit" not in user_set_fields and (
        METHODS[config.method].quantization == "forbidden" or not adapter or config.load_in_8bit
    ):
        update["load_in_4bit"] = False
    if config.lr_scheduler_type == "constant" and "warmup_ratio" not in user_set_fields:
        update["warmup_ratio"] = 0.0
    if dataset_format is not None and METHODS[config.method].is_supervised:
        update["loss_on"] = loss_tokens(config, dataset_format)
    conflicts = method_conflicts(config, user_set_fields)
    replaced = as_stored
    if machine is not None:
        conflicts += machine_conflicts(config, user_set_fields, machine)
        update["dtype"] = config.dtype or _compute_dtype(config, machine)
        quantized = update.get("load_in_4bit", config.load_in_4bit)
        replaced = as_stored + _find_replacements(config, user_set_fields, machine, quantized)
    if sharded and config.optim not in SHARDED_OPTIMIZERS and not {"optim", "weights_dtype"} & user_set_fields:
        replaced = [one for one in replaced if one.field != "optim"]
        reason, used = "The state of this optimizer cannot be divided among devices.", SHARDED_OPTIMIZERS[0]
        replaced.append(Replacement(field="optim", requested=config.optim, used=used, reason=reason))
    if longest_sequence is not None:
        if config.max_seq_length is None:
            update["max_seq_length"] = longest_sequence
        elif config.max_seq_length > longest_sequence:
            replaced.append(length_replacement(config, longest_sequence))
    update |= {replacement.field: replacement.used for replacement in replaced}
    return Effective(config.model_copy(update=update), replaced, conflicts)


def match_stored_quantization(
    config: TrainingConfig, stored: StoredQuantization | None
) -> tuple[TrainingConfig, list[Replacement]]:
    """Return a configuration with the quantization that the base's files have, and what that replaced."""
    is_quantized = wants_adapter(config) and METHODS[config.method].quantization != "forbidden"
    if stored is None or not is_quantized:
        return config, []
    values: dict[str, Any] = {"load_in_4bit": stored.bits == 4, "load_in_8bit": stored.bits == 8}
    if stored.bits == 4:
        values["bnb_4bit_quant_type"] = stored.quant_type
    how = "is dequantized when it is loaded" if stored.is_dequantized else "is loaded as it is"
    reason = f"The base model is stored {stored.text}, and {how}."
    replaced = [
        Replacement(field=name, requested=getattr(config, name), used=value, reason=reason)
        for name, value in values.items()
        if getattr(config, name) != value
    ]
    if stored.bits == 4 and config.trainer_options.double_quant != stored.double_quant:
        values["extra"] = {**config.extra, "double_quant": stored.double_quant}
    return config.model_copy(update=values), replaced


def loss_tokens(config: TrainingConfig, dataset_format: str) -> LossOn:
    """Return the tokens in the loss of a supervised run: as configured, or by the format of its training data.

    Rows of the format `tokenized` have labels, which decide instead. The answers of a run on chats (`assistant`) are
    the completions of an evaluation dataset that has prompts.
    """
    if dataset_format == "prompt_completion":
        return "all" if config.loss_on == "all" else "completion"
    return config.loss_on or "all"


def length_replacement(config: TrainingConfig, longest_sequence: int) -> Replacement:
    """Return the replacement of a default sequence length that is above the model's limit."""
    reason = f"The model takes at most {longest_sequence} tokens."
    return Replacement(field="max_seq_length", requested=config.max_seq_length, used=longest_sequence, reason=reason)


def _compute_dtype(config: TrainingConfig, machine: DeviceCapabilities) -> DType:
    return config.weights_dtype if config.weights_dtype != "float32" else default_dtype(machine)


def _find_replacements(
    config: TrainingConfig, user_set_fields: set[str], machine: DeviceCapabilities, four_bit: bool
) -> list[Replacement]:
    replaced = []
    is_stochastic = config.weights_dtype == "bfloat16" and config.extra.get("optimizer") is None

    def add_replacement(field: str, used: Any, reason: str) -> None:
        if field not in user_set_fields:
            requested = getattr(config, field)
            replaced.append(Replacement(field=field, requested=requested, used=used, reason=reason))

    if is_stochastic and not OPTIMIZERS[config.optim].rounds_stochastically:
        reason = "It updates weights in bfloat16 without rounding small updates to nothing."
        add_replacement("optim", DEFAULT_STOCHASTIC_OPTIMIZER, reason)
    if config.activation_offload and config.gradient_checkpointing == "auto":
        reason = "Activations are offloaded, and with recomputation only the inputs of the layers are moved."
        add_replacement("gradient_checkpointing", True, reason)
    if machine.kind == "cpu":
        if not is_stochastic and config.optim.startswith("paged_") and config.extra.get("optimizer") is None:
            add_replacement("optim", config.optim.removeprefix("paged_"), "Paging optimizer state needs a GPU.")
        if config.gradient_checkpointing:
            add_replacement(
                "gradient_checkpointing", False, "On a CPU it costs time, and the memory that it saves is not scarce."
            )
        if four_bit and config.dtype is None and config.bnb_4bit_compute_dtype != "float32":
            add_replacement("bnb_4bit_compute_dtype", "float32", "On this CPU, float32 is faster and more precise.")
    if four_bit and config.dtype not in (None, config.bnb_4bit_compute_dtype):
        add_replacement("bnb_4bit_compute_dtype", config.dtype, "4-bit layers compute in `dtype`.")
    elif machine.kind == "cuda" and four_bit and config.bnb_4bit_compute_dtype == "bfloat16" and not machine.bf16:
        add_replacement("bnb_4bit_compute_dtype", "float16", "This GPU does not support bfloat16.")
    return replaced
