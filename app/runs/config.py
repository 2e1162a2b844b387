"""Training configuration: what a user may ask for, what is wrong with it, and what a machine makes of it.

Pure pydantic, no torch: the API checks with it, and the training process resolves with it.
Fields, bounds and defaults: `fields.py`.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from app.runs.fields import (
    DpoOptions,
    RlhfOptions,
    TrainerOptions,
    TrainingConfig,
    TrainingMethod,
    TrainingStatus,
)

__all__ = [
    "CHANGEABLE_ON_RESUME", "SUPERVISED", "DpoOptions", "Effective", "Machine", "Problem", "Replacement", "RlhfOptions",
    "TrainerOptions", "TrainingConfig", "TrainingMethod", "TrainingStatus", "given_fields", "problems",
    "resolve", "resume_problems",
]  # fmt: skip

SUPERVISED = (TrainingMethod.full, TrainingMethod.lora, TrainingMethod.qlora, TrainingMethod.sft)
"""Methods that learn from examples; the one place that lists them."""
CHANGEABLE_ON_RESUME = frozenset({
    "epochs", "max_steps", "min_steps", "save_steps", "save_total_limit", "logging_steps", "eval_steps",
    "time_limit_seconds", "stop_at_step", "early_stopping_patience", "learning_rate", "weight_decay",
})  # fmt: skip
"""Fields that a resumed run may change; any other would silently train something else than it continues."""

_ADAPTER_FIELDS = (
    "lora_r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "modules_to_save",
)  # fmt: skip
_GROUPS = ("dpo", "rlhf", "extra")


class Problem(BaseModel):
    """One thing wrong with a configuration."""

    field: str = Field(description="Name of the field, dotted within a group.", examples=["learning_rate"])
    code: str = Field(description="Stable and in snake_case.", examples=["out_of_range"])
    message: str = Field(description="What is wrong and what to do about it.")


class Replacement(BaseModel):
    """A default that this machine cannot honour, and what is used in its place."""

    field: str
    requested: Any
    used: Any
    reason: str


class Machine(BaseModel):
    """What the device of a run can do."""

    kind: Literal["cpu", "cuda"] = "cpu"
    bf16: bool = False
    flash_attention: bool = Field(default=False, description="Whether `flash_attention_2` can be used.")
    flash_attention_3: bool = Field(default=False, description="Whether `flash_attention_3` can be used.")


@dataclass(frozen=True)
class Effective:
    """A configuration with every choice made."""

    config: TrainingConfig
    replaced: list[Replacement]
    problems: list[Problem]


def given_fields(config_input: Mapping[str, Any]) -> set[str]:
    """Names of the fields that the user set, dotted within a group (`dpo.beta`)."""
    names = {name for name in config_input if name not in _GROUPS}
    for group in _GROUPS:
        members = config_input.get(group)
        if isinstance(members, Mapping):
            names |= {f"{group}.{member}" for member in members}
        elif group in config_input:
            names.add(group)
    return names


def problems(
    config_input: Any,
    *,
    has_eval_dataset: bool,
    dataset_format: str | None = None,
    machine: Machine | None = None,
) -> list[Problem]:
    """Everything wrong with a configuration as the user wrote it, all at once; empty: it can run.

    `dataset_format` is `chat`, `prompt_completion`, `text` or None (not known yet); `machine` None: any.
    """
    if not isinstance(config_input, Mapping):
        return [_problem("config", "wrong_type", "must be an object of fields and values")]
    # A name may hold lone surrogates, which neither pydantic nor a JSON answer can carry.
    config_input = {_printable(str(name)): value for name, value in config_input.items()}
    found: list[Problem] = []
    try:
        config = TrainingConfig.model_validate(config_input)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        found = _from_pydantic(errors, TrainingConfig)
        # From the raw errors: what is shown is cut, and a name may hold dots or be empty.
        bad = {error["loc"][0] for error in errors if error["loc"]}
        sound = {name: value for name, value in config_input.items() if name not in bad}
        config = TrainingConfig.model_validate({"base_model": "unknown", **sound})
        config_input = sound
    try:
        TrainerOptions.model_validate(config.extra)
    except ValidationError as error:
        found += _from_pydantic(error.errors(include_url=False), TrainerOptions, "extra")
    given = given_fields(config_input)
    found += _not_available_yet(config)
    found += _method_conflicts(config, given)
    found += _eval_conflicts(config, given, has_eval_dataset)
    found += _data_conflicts(config, given, dataset_format)
    if machine is not None:
        found += _machine_conflicts(config, given, machine)
    return found


def resolve(config: TrainingConfig, given: Iterable[str], machine: Machine | None) -> Effective:
    """Make every choice that is open; a value that was *given* and cannot be honoured is a problem.

    Defaults that follow from the method resolve in silence, as documented with the fields; one that the
    machine cannot honour is replaced by the nearest that works, and told. `machine` None leaves those be.
    """
    given = set(given)
    update: dict[str, Any] = {}
    adapter = _wants_adapter(config)
    if not adapter:
        update["lora_r"] = None
    if "load_in_4bit" not in given and (
        config.method in (TrainingMethod.full, TrainingMethod.lora) or not adapter or config.load_in_8bit
    ):
        update["load_in_4bit"] = False
    if config.lr_scheduler_type == "constant" and "warmup_ratio" not in given:
        update["warmup_ratio"] = 0.0
    found = _method_conflicts(config, given)
    replaced: list[Replacement] = []
    if machine is not None:
        found += _machine_conflicts(config, given, machine)
        quantised = update.get("load_in_4bit", config.load_in_4bit)
        replaced = _replacements(config, given, machine, quantised)
        update |= {replacement.field: replacement.used for replacement in replaced}
    return Effective(config.model_copy(update=update), replaced, found)


def resume_problems(parent_config: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[Problem]:
    """The overrides that a resumed run may not make: what it learned so far depends on the old value."""
    return [
        _problem(
            name,
            "not_changeable_on_resume",
            "cannot change when a run is resumed; start a new run to train with another value",
        )
        for name, value in overrides.items()
        if name in TrainingConfig.model_fields and name not in CHANGEABLE_ON_RESUME and value != parent_config.get(name)
    ]


def _wants_adapter(config: TrainingConfig) -> bool:
    return config.method is not TrainingMethod.full and config.lora_r is not None


def _problem(field: str, code: str, message: str) -> Problem:
    return Problem(field=field, code=code, message=f"`{field}` {message}.")


def _not_available_yet(config: TrainingConfig) -> list[Problem]:
    wanted = {
        "method": config.method not in SUPERVISED and config.method.value,
        "activation_offload": config.activation_offload,
        "torch_compile": config.torch_compile,
        "gradient_checkpointing": config.gradient_checkpointing == "auto" and "auto",
        "on_non_finite": config.on_non_finite == "rewind" and "rewind",
        "on_spike": config.on_spike != "ignore" and config.on_spike,
        "report_to": ", ".join(config.report_to),
        "push_to_hub": config.push_to_hub,
    }
    return [
        _problem(name, "not_available_yet", f"cannot be {str(value).lower()} yet: this version has no such feature")
        for name, value in wanted.items()
        if value
    ]


def _method_conflicts(config: TrainingConfig, given: set[str]) -> list[Problem]:
    found = []
    method = config.method
    if config.load_in_8bit and config.load_in_4bit and "load_in_4bit" in given:
        found.append(_problem("load_in_8bit", "conflict", "and `load_in_4bit` cannot both be true; choose one"))
    for name in ("load_in_4bit", "load_in_8bit"):
        if not (getattr(config, name) and name in given):
            continue
        if method is TrainingMethod.full:
            found.append(_problem(name, "conflict", "does not go with method `full`, which trains every weight"))
        elif method is TrainingMethod.lora:
            found.append(_problem(name, "conflict", "does not go with method `lora`; use `qlora`"))
        elif config.lora_r is None:
            found.append(_problem(name, "conflict", "needs an adapter: quantised weights cannot train; set `lora_r`"))
    if method in (TrainingMethod.lora, TrainingMethod.qlora) and config.lora_r is None:
        found.append(_problem("lora_r", "conflict", f"cannot be null with method `{method}`; use `full` or `sft`"))
    unquantised = "load_in_4bit" in given and not config.load_in_4bit and not config.load_in_8bit
    if method is TrainingMethod.qlora and unquantised:
        found.append(_problem("load_in_4bit", "conflict", "is false, but `qlora` needs a 4 or 8-bit base"))
    if not _wants_adapter(config):
        found += [
            _problem(name, "conflict", "belongs to an adapter, and this run trains every weight; leave it out")
            for name in _ADAPTER_FIELDS
            if name in given and getattr(config, name) is not None
        ]
    elif config.target_modules and "lm_head" in config.target_modules:
        found.append(
            _problem("target_modules", "conflict", "cannot hold `lm_head`; put it in `modules_to_save` to train it")
        )
    four_bit = config.load_in_4bit and not config.load_in_8bit and _wants_adapter(config)
    if not four_bit or method in (TrainingMethod.full, TrainingMethod.lora):
        found += [
            _problem(name, "conflict", "matters only with a 4-bit base, and this run has none; leave it out")
            for name in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "extra.double_quant")
            if name in given
        ]
    for group in ("dpo", "rlhf"):
        if method != group and any(name.split(".")[0] == group for name in given):
            found.append(_problem(group, "conflict", f"belongs to method `{group}`, and the method is `{method}`"))
    if config.lr_scheduler_type == "constant" and "warmup_ratio" in given and config.warmup_ratio > 0:
        found.append(_problem("warmup_ratio", "conflict", "has no effect with `constant`; use `constant_with_warmup`"))
    # It ends at a rate of 1e-7, and has to come down to it.
    if config.lr_scheduler_type == "polynomial" and config.learning_rate <= 1e-7:
        found.append(_problem("learning_rate", "conflict", "must be above 1e-7 with `polynomial`, which ends there"))
    # Lion has momenta and no epsilon; the others here have neither.
    known = {"adamw": ("adam_beta1", "adam_beta2", "adam_epsilon"), "lion": ("adam_beta1", "adam_beta2")}
    used = next((names for family, names in known.items() if family in config.optim), ())
    found += [
        _problem(f"extra.{name}", "conflict", f"has no effect with `{config.optim}`; leave it out")
        for name in known["adamw"]
        if f"extra.{name}" in given and name not in used
    ]
    if config.max_steps is not None and config.min_steps is not None and config.min_steps > config.max_steps:
        found.append(_problem("min_steps", "conflict", "cannot be above `max_steps`"))
    if config.revision is not None and config.base_model.startswith("run_"):
        found.append(_problem("revision", "conflict", "belongs to a hub model, and the base is a run"))
    return found


def _eval_conflicts(config: TrainingConfig, given: set[str], has_eval_dataset: bool) -> list[Problem]:
    found = []
    has_data = has_eval_dataset or config.eval_split > 0
    if has_eval_dataset and config.eval_split > 0:
        found.append(_problem("eval_split", "conflict", "and an evaluation dataset cannot both be given; choose one"))
    if config.eval_steps is not None and not has_data:
        found.append(_problem("eval_steps", "needs_eval_data", "needs an evaluation dataset, or `eval_split` above 0"))
    if has_data and config.eval_steps is None:
        found.append(
            _problem("eval_steps", "needs_eval_steps", "must say how often to evaluate on the data held out for it")
        )
    if config.early_stopping_patience is not None and config.eval_steps is None:
        found.append(_problem("early_stopping_patience", "needs_eval_steps", "counts evaluations; set `eval_steps`"))
    if "extra.eval_batch_size" in given and not has_data:
        found.append(_problem("extra.eval_batch_size", "needs_eval_data", "needs data to evaluate on"))
    return found


def _data_conflicts(config: TrainingConfig, given: set[str], dataset_format: str | None) -> list[Problem]:
    found = []
    if dataset_format is not None and config.loss_on == "assistant" and dataset_format != "chat":
        found.append(
            _problem("loss_on", "conflict", f"`assistant` needs a dataset of format `chat`, not `{dataset_format}`")
        )
    if dataset_format == "text" and config.loss_on == "completion":
        found.append(_problem("loss_on", "conflict", "`completion` does not go with plain `text`, which has none"))
    if config.packing and config.max_seq_length is None:
        found.append(_problem("packing", "conflict", "needs `max_seq_length`, the length of a packed sequence"))
    if "extra.packing_strategy" in given and not config.packing:
        found.append(_problem("extra.packing_strategy", "conflict", "has no effect without `packing`"))
    if config.packing and config.extra.get("packing_strategy") == "wrapped" and "truncation_mode" in given:
        found.append(
            _problem("truncation_mode", "conflict", "has no effect with `wrapped` packing, which cuts nothing off")
        )
    return found


def _machine_conflicts(config: TrainingConfig, given: set[str], machine: Machine) -> list[Problem]:
    found = []
    code = "not_on_this_machine"
    if "optim" in given and config.optim.startswith("paged_") and machine.kind != "cuda":
        found.append(_problem("optim", code, f"`{config.optim}` needs a GPU; on a CPU use `adamw_torch`"))
    if config.use_dora and config.load_in_8bit and machine.kind == "cpu":
        found.append(_problem("use_dora", code, "does not work on an 8-bit base on a CPU; use `load_in_4bit`"))
    attention = config.attn_implementation or ""
    flash = {"flash_attention_2": machine.flash_attention, "flash_attention_3": machine.flash_attention_3}
    if attention in flash and not (machine.kind == "cuda" and flash[attention]):
        found.append(_problem("attn_implementation", code, f"`{attention}` needs a GPU with flash-attn; use `sdpa`"))
    compute = config.bnb_4bit_compute_dtype if "bnb_4bit_compute_dtype" in given else None
    if compute == "bfloat16" and machine.kind == "cuda" and not machine.bf16:
        found.append(_problem("bnb_4bit_compute_dtype", code, "`bfloat16` is not supported by this GPU"))
    if compute == "float16" and machine.kind == "cpu":
        found.append(_problem("bnb_4bit_compute_dtype", code, "`float16` needs a GPU; use `float32`"))
    return found


def _replacements(config: TrainingConfig, given: set[str], machine: Machine, four_bit: bool) -> list[Replacement]:
    replaced = []

    def replace(field: str, used: Any, reason: str) -> None:
        if field not in given:
            requested = getattr(config, field)
            replaced.append(Replacement(field=field, requested=requested, used=used, reason=reason))

    if machine.kind == "cpu":
        if config.optim.startswith("paged_"):
            replace("optim", config.optim.removeprefix("paged_"), "Paging optimizer state needs a GPU.")
        if config.gradient_checkpointing:
            replace("gradient_checkpointing", False, "On a CPU it costs time and saves memory that is not scarce.")
        if four_bit and config.bnb_4bit_compute_dtype != "float32":
            replace("bnb_4bit_compute_dtype", "float32", "This CPU computes in 32 bits faster and more exactly.")
    elif four_bit and config.bnb_4bit_compute_dtype == "bfloat16" and not machine.bf16:
        replace("bnb_4bit_compute_dtype", "float16", "This GPU has no bfloat16.")
    return replaced


_CODES = {
    "missing": "missing", "extra_forbidden": "unknown_field", "literal_error": "unknown_value",
    "enum": "unknown_value", "finite_number": "not_finite", "greater_than": "out_of_range",
    "greater_than_equal": "out_of_range", "less_than": "out_of_range", "less_than_equal": "out_of_range",
    "int_parsing_size": "out_of_range", "string_too_short": "out_of_range", "string_too_long": "out_of_range",
    "too_short": "out_of_range", "too_long": "out_of_range", "string_pattern_mismatch": "invalid_name",
}  # fmt: skip


def _from_pydantic(errors: list[ErrorDetails], model: type[BaseModel], *prefix: str) -> list[Problem]:
    found: dict[str, Problem] = {}
    for error in errors[:200]:
        parts = [str(part) or '""' for part in error["loc"]]
        if parts and parts[0] == "gradient_checkpointing":
            parts = parts[:1]  # one problem for a field, not one for each type that it might have been
        name = _printable(".".join([*prefix, *parts]) or "config")[:200]
        code = _CODES.get(error["type"], "wrong_type" if error["type"].endswith("_type") else "invalid")
        found.setdefault(name, _problem(name, code, _sentence(error, parts, model)))
    return list(found.values())


def _sentence(error: ErrorDetails, parts: list[str], model: type[BaseModel]) -> str:
    if error["type"] == "missing":
        return "is required"
    if error["type"] == "extra_forbidden":
        known = model.model_fields if len(parts) == 1 else {}
        near = difflib.get_close_matches(parts[-1], known, n=1)
        return "is not a field of the configuration" + (f"; perhaps `{near[0]}`" if near else "")
    if parts == ["gradient_checkpointing"]:
        return 'must be true, false or "auto"'
    if error["type"] == "string_pattern_mismatch":
        if parts == ["base_model"]:
            return "must be a name such as `folder`, `owner/model` or `run_…`, not a path elsewhere"
        return "holds characters that a name cannot have"
    got = _shown(error["input"])
    sentence = error["msg"].replace("Input should", "must", 1).removesuffix(".")
    return _printable(f"{sentence}, not {got}")


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**60:
        return "a number of that size"  # Python refuses to write out very long ones
    return repr(value)[:60] if isinstance(value, str | int | float | None) else "that"


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
