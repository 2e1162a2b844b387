"""Validation of a training configuration, and resolution of its defaults for a machine.

Pure pydantic, no torch: the API validates with it, and the training process resolves with it.
Fields, bounds and defaults: `fields.py`; conflicts between fields: `rules.py`.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import OPTION_GROUPS
from anneal.contracts.plugins import replaced_fields
from anneal.contracts.training_config.adapters import adapter_conflicts
from anneal.contracts.training_config.field_traits import CHANGEABLE_ON_RESUME
from anneal.contracts.training_config.fields import TrainerOptions, TrainingConfig
from anneal.contracts.training_config.optimizers import NOT_SUPPORTED
from anneal.contracts.training_config.peer_names import FIELDS, OFFLOADED_OPTIMIZER, suggest_name
from anneal.contracts.training_config.raw_config import given_fields, named_fields, normalize_numbers
from anneal.contracts.training_config.rules import (
    DeviceCapabilities,
    data_conflicts,
    eval_conflicts,
    field_error,
    machine_conflicts,
    method_conflicts,
    wants_adapter,
)


def config_errors(
    config_input: Any,
    *,
    has_eval_dataset: bool,
    dataset_format: str | None = None,
    machine: DeviceCapabilities | None = None,
) -> list[FieldError]:
    """Return all errors in a configuration as the user wrote it; if there are none, it can run.

    `dataset_format` is one of `app.datasets.formats`, or None if not known yet; `machine` None: any machine.
    """
    if not isinstance(config_input, Mapping):
        return [field_error("config", "wrong_type", "must be an object with fields and values")]
    # A name may contain lone surrogates, which neither pydantic nor a JSON response can encode.
    config_input = {_replace_surrogates(str(name)): value for name, value in config_input.items()}
    field_errors: list[FieldError] = []
    bad: set[int | str] = set()
    try:
        config = TrainingConfig.model_validate(config_input)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        field_errors = _from_pydantic(errors, TrainingConfig)
        # From the raw errors: the names shown are truncated, and a name may contain dots or be empty.
        bad = {error["loc"][0] for error in errors if error["loc"]}
        sound = {name: value for name, value in config_input.items() if name not in bad}
        config = TrainingConfig.model_validate({"base_model": "unknown", **sound})
        config_input = sound
    try:
        TrainerOptions.model_validate(config.extra)
    except ValidationError as error:
        field_errors += _from_pydantic(error.errors(include_url=False), TrainerOptions, "extra")
    user_set_fields = given_fields(config_input)
    together = _config_conflicts(config, config_input, user_set_fields, has_eval_dataset, dataset_format)
    if machine is not None:
        together += machine_conflicts(config, user_set_fields, machine)
    # These checks saw the default of a field that was rejected above: drop their errors for it.
    return field_errors + [one for one in together if one.field.split(".")[0] not in bad]


def ignored_defaults(
    config_input: Mapping[str, Any], *, has_eval_dataset: bool, dataset_format: str | None
) -> list[FieldError]:
    """Return a warning for each conflict of a valid configuration that is ignored because a value is the default.

    The arguments are those of `config_errors`.
    """
    config = TrainingConfig.model_validate(dict(config_input))
    facts = (has_eval_dataset, dataset_format)
    judged = _config_conflicts(config, config_input, given_fields(config_input), *facts)
    return [
        FieldError(
            field=one.field,
            code="equals_default",
            message=f"A value equal to the default counts as not given, so this is no error: {one.message}",
        )
        for one in _config_conflicts(config, config_input, named_fields(config_input), *facts)
        if one not in judged
    ]


def _config_conflicts(
    config: TrainingConfig,
    config_input: Mapping[str, Any],
    user_set_fields: set[str],
    has_eval_dataset: bool,
    dataset_format: str | None,
) -> list[FieldError]:
    """Return all conflicts that do not depend on the machine."""
    return [
        *method_conflicts(config, user_set_fields),
        *(adapter_conflicts(config) if wants_adapter(config) else []),
        *eval_conflicts(config, user_set_fields, has_eval_dataset),
        *data_conflicts(config, user_set_fields, dataset_format),
        *(field_error(name, "conflict", why) for name, why in replaced_fields(config_input, user_set_fields)),
    ]


def resume_problems(parent_config: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[FieldError]:
    """Return errors for overrides that a resumed run may not make: its progress depends on the old values."""
    return [
        field_error(
            name,
            "not_changeable_on_resume",
            "cannot change when a run is resumed; start a new run to train with another value",
        )
        for name, value in normalize_numbers(overrides).items()
        if name in TrainingConfig.model_fields and name not in CHANGEABLE_ON_RESUME and value != parent_config.get(name)
    ]


_INTERVALS = ("save_steps", "eval_steps", "sample_steps")
"""Fields that accept a number of steps or `epoch`."""

_CHOICES = {"gradient_checkpointing": '"selective" or "auto"', "memory_profile": '"steps"'}
"""Fields that accept true, false, or these values."""

_NO_TYPE = {"union_tag_invalid": "unknown_value", "union_tag_not_found": "missing"}

_OWN_CODES = (
    "bad_pattern",
    "bad_schema",
    "bad_bounds",
    "bad_instructions",
    "bad_count",
    "bad_template",
    "bad_url",
    "bad_parameters",
    "needs_importance_matrix",
    "out_of_range",
)
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


def _from_pydantic(errors: list[ErrorDetails], model: type[BaseModel], *prefix: str) -> list[FieldError]:
    errors_by_field: dict[str, FieldError] = {}
    for error in errors[:200]:
        parts = [str(part) or '""' for part in error["loc"]]
        if parts and parts[0] in (*_CHOICES, *_INTERVALS):
            parts = parts[:1]  # one error per field, not one per member of its union
        if parts[0:1] == ["sample_prompts"]:
            del parts[2:3]  # the kind of the prompt, which pydantic adds
        if parts[0:1] and parts[0] in OPTION_GROUPS and parts[1:2] == ["rewards"]:
            del parts[3:4]  # the discriminator that pydantic adds
            parts += ["type"] if error["type"] in _NO_TYPE else []
        name = _replace_surrogates(".".join([*prefix, *parts]) or "config")[:200]
        if error["type"] == "float_type" and type(error["input"]) is int:
            error = {**error, "type": "too_large", "msg": "Input should be smaller"}  # larger than any float
        code = _CODES.get(error["type"], "wrong_type" if error["type"].endswith("_type") else "invalid")
        errors_by_field.setdefault(name, field_error(name, code, _error_sentence(error, parts, model)))
    return list(errors_by_field.values())


def _error_sentence(error: ErrorDetails, parts: list[str], model: type[BaseModel]) -> str:
    if error["type"] in ("missing", "union_tag_not_found"):
        return "is required"
    if parts[:1] and parts[0] in _INTERVALS and isinstance(error["input"], str) and error["input"][:1].isalpha():
        return _replace_surrogates(f'must be a number of steps or "epoch", not {_format_value(error["input"])}')
    if error["type"] in _OWN_CODES:
        return _replace_surrogates(error["msg"])
    if error["type"] == "union_tag_invalid":
        return f"must be one of {error['ctx']['expected_tags']}"
    if error["type"] == "extra_forbidden":
        return f"is not a field of the configuration{_field_hint(parts, error['input'], model)}"
    if len(parts) == 1 and parts[0] in _CHOICES:
        return f"must be true, false or {_CHOICES[parts[0]]}"
    if error["type"] == "string_pattern_mismatch":
        if parts[-1] in ("base_model", "model", "tokenizer"):
            return "must be a name such as `folder`, `owner/model` or `run_…`, not a path outside the models root"
        return "contains characters that are not allowed in a name"
    got = _format_value(error["input"])
    sentence = error["msg"].replace("Input should", "must", 1).removesuffix(".")
    near = []
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        if error["input"] in NOT_SUPPORTED:
            return f"cannot be {got}: {NOT_SUPPORTED[error['input']]}"
        if parts == ["optim"] and "offload" in error["input"].lower():
            return _replace_surrogates(f"cannot be {got}; {OFFLOADED_OPTIMIZER}")
        choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        text = error["input"].lower()
        begin_so = [one for one in choices if text and one.lower().startswith(text)]  # `adamw` is no `paged_adamw_8bit`
        near = begin_so or difflib.get_close_matches(text, choices, n=1)
    return _replace_surrogates(f"{sentence}, not {got}" + (f"; perhaps `{near[0]}`" if near else ""))


def _field_hint(parts: list[str], value: Any, model: type[BaseModel]) -> str:
    """Return a hint at the field that an unknown name with this value probably means."""
    *group, name = parts
    if group:
        options = OPTION_GROUPS.get(group[0]) if len(group) == 1 else None
        if options and (ours := FIELDS.get(name, "")).startswith(f"{group[0]}."):
            return f"; use `{ours}`"
        near = difflib.get_close_matches(name, options.model_fields if options else (), n=1)
        return f"; perhaps `{group[0]}.{near[0]}`" if near else ""
    if model is TrainerOptions:
        return (
            "; move it out of `extra`"
            if name in TrainingConfig.model_fields
            else suggest_name(name, model.model_fields)
        )
    # A plugin is an object; text with its name means what other trainers call so.
    is_option = name in TrainerOptions.model_fields and (isinstance(value, Mapping) or name not in FIELDS)
    return f"; use `extra.{name}`" if is_option else suggest_name(name, model.model_fields)


def _format_value(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**60:
        return "a number of that size"  # Python refuses to format very long ones
    return repr(value)[:60] if isinstance(value, str | int | float | None) else "this value"


def _replace_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
