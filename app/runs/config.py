"""Validation of a training configuration, and resolution of its defaults for a machine.

Pure pydantic, no torch: the API validates with it, and the training process resolves with it.
Fields, bounds and defaults: `fields.py`; conflicts between fields: `conflicts.py`.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from app.runs.conflicts import (
    Machine,
    Problem,
    data_conflicts,
    eval_conflicts,
    machine_conflicts,
    method_conflicts,
    problem,
    wants_adapter,
)
from app.runs.counts import Friendly
from app.runs.fields import (
    PREFERENCE,
    SUPERVISED,
    DpoOptions,
    RlhfOptions,
    TrainerOptions,
    TrainingConfig,
    TrainingMethod,
    TrainingStatus,
)
from app.runs.plugins import doubled

__all__ = [
    "CHANGEABLE_ON_RESUME", "PREFERENCE", "SUPERVISED", "DpoOptions", "Effective", "Machine", "Problem",
    "Replacement", "RlhfOptions", "TrainerOptions", "TrainingConfig", "TrainingMethod", "TrainingStatus",
    "given_fields", "in_numbers", "problems", "resolve", "resume_problems", "understood",
]  # fmt: skip

CHANGEABLE_ON_RESUME = frozenset({
    "epochs", "max_steps", "min_steps", "save_steps", "save_total_limit", "logging_steps", "eval_steps",
    "time_limit_seconds", "stop_at_step", "early_stopping_patience", "learning_rate", "weight_decay",
    "report_to", "push_to_hub", "on_non_finite", "on_spike", "on_out_of_memory",
})  # fmt: skip
"""Fields that a resumed run may change; changing any other would silently train something else."""

_GROUPS = ("dpo", "rlhf", "extra")


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
    problems: list[Problem]


def given_fields(config_input: Mapping[str, Any]) -> set[str]:
    """Return the names of the fields that the user set, dotted within a group (`dpo.beta`)."""
    names = {name for name in config_input if name not in _GROUPS}
    for group in _GROUPS:
        members = config_input.get(group)
        if isinstance(members, Mapping):
            names |= {f"{group}.{member}" for member in members}
        elif group in config_input:
            names.add(group)
    return names


def understood(stored: Mapping[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """Drop the defaults of fields that this version does not have from a stored configuration.

    During an upgrade, a newer API writes for older workers. Fields that the user set stay, and are rejected.
    """
    given = set(given)
    kept = {name: value for name, value in stored.items() if name in TrainingConfig.model_fields or name in given}
    for name, model in (("dpo", DpoOptions), ("rlhf", RlhfOptions)):
        if isinstance(kept.get(name), Mapping):
            known = {*model.model_fields, *(one.partition(".")[2] for one in given if one.startswith(f"{name}."))}
            kept[name] = {member: value for member, value in kept[name].items() if member in known}
    return kept


def in_numbers(config_input: Mapping[str, Any]) -> dict[str, Any]:
    """Convert text such as `"10k"` to numbers where a field accepts it; what cannot be parsed stays unchanged."""
    return {name: _FRIENDLY[name].number(value) if name in _FRIENDLY else value for name, value in config_input.items()}


def _friendly(annotations: Iterable[Any]) -> Friendly | None:
    return next((one for one in annotations if isinstance(one, Friendly)), None)


_FRIENDLY: dict[str, Friendly] = {
    name: friendly
    for name, field in TrainingConfig.model_fields.items()
    # A nullable field has its annotations one level down.
    for friendly in [
        _friendly([*field.metadata, *(one for arg in get_args(field.annotation) for one in get_args(arg)[1:])])
    ]
    if friendly is not None
}


def problems(
    config_input: Any,
    *,
    has_eval_dataset: bool,
    dataset_format: str | None = None,
    machine: Machine | None = None,
) -> list[Problem]:
    """Return all errors in a configuration as the user wrote it; if there are none, it can run.

    `dataset_format` is one of `app.datasets.formats`, or None if not known yet; `machine` None: any machine.
    """
    if not isinstance(config_input, Mapping):
        return [problem("config", "wrong_type", "must be an object with fields and values")]
    # A name may contain lone surrogates, which neither pydantic nor a JSON response can encode.
    config_input = {_printable(str(name)): value for name, value in config_input.items()}
    found: list[Problem] = []
    bad: set[int | str] = set()
    try:
        config = TrainingConfig.model_validate(config_input)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        found = _from_pydantic(errors, TrainingConfig)
        # From the raw errors: the names shown are truncated, and a name may contain dots or be empty.
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
    together = method_conflicts(config, given)
    together += eval_conflicts(config, given, has_eval_dataset)
    together += data_conflicts(config, given, dataset_format)
    together += [problem(name, "conflict", why) for name, why in doubled(config_input, given)]
    if machine is not None:
        together += machine_conflicts(config, given, machine)
    # These checks saw the default of a field that was rejected above: drop their errors for it.
    return found + [one for one in together if one.field.split(".")[0] not in bad]


def resolve(config: TrainingConfig, given: Iterable[str], machine: Machine | None) -> Effective:
    """Resolve all defaults; a value that was *given* and is not supported is an error.

    Defaults that follow from the method are resolved silently, as documented with the fields. A default that
    the machine does not support is replaced by the nearest that works, and reported; `machine` None keeps those.
    """
    given = set(given)
    update: dict[str, Any] = {}
    adapter = wants_adapter(config)
    if not adapter:
        update["lora_r"] = None
    if "load_in_4bit" not in given and (
        config.method in (TrainingMethod.full, TrainingMethod.lora) or not adapter or config.load_in_8bit
    ):
        update["load_in_4bit"] = False
    if config.lr_scheduler_type == "constant" and "warmup_ratio" not in given:
        update["warmup_ratio"] = 0.0
    found = method_conflicts(config, given)
    replaced: list[Replacement] = []
    if machine is not None:
        found += machine_conflicts(config, given, machine)
        quantized = update.get("load_in_4bit", config.load_in_4bit)
        replaced = _replacements(config, given, machine, quantized)
        update |= {replacement.field: replacement.used for replacement in replaced}
    return Effective(config.model_copy(update=update), replaced, found)


def resume_problems(parent_config: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[Problem]:
    """Return errors for overrides that a resumed run may not make: its progress depends on the old values."""
    return [
        problem(
            name,
            "not_changeable_on_resume",
            "cannot change when a run is resumed; start a new run to train with another value",
        )
        for name, value in in_numbers(overrides).items()
        if name in TrainingConfig.model_fields and name not in CHANGEABLE_ON_RESUME and value != parent_config.get(name)
    ]


def _not_available_yet(config: TrainingConfig) -> list[Problem]:
    wanted: dict[str, bool | str] = {
        "activation_offload": config.activation_offload,
        "torch_compile": config.torch_compile,
    }
    return [
        problem(
            name,
            "not_available_yet",
            f"cannot be {str(value).lower()} yet: this version does not support it; leave the field out",
        )
        for name, value in wanted.items()
        if value
    ]


def _replacements(config: TrainingConfig, given: set[str], machine: Machine, four_bit: bool) -> list[Replacement]:
    replaced = []

    def replace(field: str, used: Any, reason: str) -> None:
        if field not in given:
            requested = getattr(config, field)
            replaced.append(Replacement(field=field, requested=requested, used=used, reason=reason))

    if machine.kind == "cpu":
        if config.optim.startswith("paged_") and config.extra.get("optimizer") is None:
            replace("optim", config.optim.removeprefix("paged_"), "Paging optimizer state needs a GPU.")
        if config.gradient_checkpointing:
            replace(
                "gradient_checkpointing", False, "On a CPU it costs time, and the memory that it saves is not scarce."
            )
        if four_bit and config.bnb_4bit_compute_dtype != "float32":
            replace("bnb_4bit_compute_dtype", "float32", "On this CPU, float32 is faster and more precise.")
    elif four_bit and config.bnb_4bit_compute_dtype == "bfloat16" and not machine.bf16:
        replace("bnb_4bit_compute_dtype", "float16", "This GPU does not support bfloat16.")
    return replaced


_CHOICES = {"gradient_checkpointing": '"selective" or "auto"', "memory_profile": '"steps"'}
"""Fields that accept true, false, or these values."""
_NO_TYPE = {"union_tag_invalid": "unknown_value", "union_tag_not_found": "missing"}
_OWN_CODES = ("bad_pattern", "bad_schema", "bad_bounds", "bad_count", "out_of_range")
"""Error codes of our own validators, whose messages are complete."""
_CODES = {
    "missing": "missing", "extra_forbidden": "unknown_field", "literal_error": "unknown_value",
    "enum": "unknown_value", "finite_number": "not_finite", "greater_than": "out_of_range",
    "greater_than_equal": "out_of_range", "less_than": "out_of_range", "less_than_equal": "out_of_range",
    "int_parsing_size": "out_of_range", "string_too_short": "out_of_range", "string_too_long": "out_of_range",
    "too_large": "out_of_range", "too_short": "out_of_range", "too_long": "out_of_range",
    "string_pattern_mismatch": "invalid_name",
    **_NO_TYPE, **{code: code for code in _OWN_CODES},
}  # fmt: skip


def _from_pydantic(errors: list[ErrorDetails], model: type[BaseModel], *prefix: str) -> list[Problem]:
    found: dict[str, Problem] = {}
    for error in errors[:200]:
        parts = [str(part) or '""' for part in error["loc"]]
        if parts and parts[0] in _CHOICES:
            parts = parts[:1]  # one error per field, not one per member of its union
        if parts[:2] == ["rlhf", "rewards"]:
            del parts[3:4]  # the discriminator that pydantic adds
            parts += ["type"] if error["type"] in _NO_TYPE else []
        name = _printable(".".join([*prefix, *parts]) or "config")[:200]
        if error["type"] == "float_type" and type(error["input"]) is int:
            error = {**error, "type": "too_large", "msg": "Input should be smaller"}  # larger than any float
        code = _CODES.get(error["type"], "wrong_type" if error["type"].endswith("_type") else "invalid")
        found.setdefault(name, problem(name, code, _sentence(error, parts, model)))
    return list(found.values())


def _sentence(error: ErrorDetails, parts: list[str], model: type[BaseModel]) -> str:
    if error["type"] in ("missing", "union_tag_not_found"):
        return "is required"
    if error["type"] in _OWN_CODES:
        return _printable(error["msg"])
    if error["type"] == "union_tag_invalid":
        return f"must be one of {error['ctx']['expected_tags']}"
    if error["type"] == "extra_forbidden":
        known = model.model_fields if len(parts) == 1 else {}
        near = difflib.get_close_matches(parts[-1], known, n=1)
        return "is not a field of the configuration" + (f"; perhaps `{near[0]}`" if near else "")
    if len(parts) == 1 and parts[0] in _CHOICES:
        return f"must be true, false or {_CHOICES[parts[0]]}"
    if error["type"] == "string_pattern_mismatch":
        if parts[-1] in ("base_model", "model"):
            return "must be a name such as `folder`, `owner/model` or `run_…`, not a path outside the models root"
        return "contains characters that are not allowed in a name"
    got = _shown(error["input"])
    sentence = error["msg"].replace("Input should", "must", 1).removesuffix(".")
    return _printable(f"{sentence}, not {got}")


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**60:
        return "a number of that size"  # Python refuses to format very long ones
    return repr(value)[:60] if isinstance(value, str | int | float | None) else "this value"


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
