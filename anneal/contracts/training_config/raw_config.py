"""A configuration as the user wrote it: named and given fields, numbers, unknown fields."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from anneal.contracts.human_numbers import HumanNumber, human_numbers
from anneal.contracts.methods import OPTION_GROUPS, method_of
from anneal.contracts.training_config.fields import TrainerOptions, TrainingConfig

GROUPS = (*OPTION_GROUPS, "extra")
"""Fields that contain fields."""

PROBE_STEPS = 2
"""Steps of a probe (`extra.probe`)."""


def named_fields(config_input: Mapping[str, Any]) -> set[str]:
    """Return the names of the fields in a configuration, dotted within a group (`dpo.beta`)."""
    return {name for name, _ in _flatten_groups(config_input)}


def given_fields(config_input: Mapping[str, Any]) -> set[str]:
    """Return the names of the fields that the user set; a value equal to the default counts as not set.

    So a client may send every field of a configuration, with those that its method does not use at their defaults.
    """
    of_method = method_of(config_input).default_fields(config_input.get("lora_r", _DEFAULTS["lora_r"]))
    return {
        name
        for name, value in _flatten_groups(normalize_numbers(config_input))
        if not any(_is_same(value, defaults.get(name, _NO_DEFAULT)) for defaults in (_DEFAULTS, of_method))
    }


def drop_unknown_fields(stored: Mapping[str, Any], user_set_fields: Iterable[str]) -> dict[str, Any]:
    """Drop the defaults of fields that this version does not have from a stored configuration.

    During an upgrade, a newer API writes for older workers. Fields that the user set stay, and are rejected.
    """
    user_set_fields = set(user_set_fields)
    config = {
        name: value for name, value in stored.items() if name in TrainingConfig.model_fields or name in user_set_fields
    }
    for name, model in OPTION_GROUPS.items():
        if isinstance(config.get(name), Mapping):
            known = {
                *model.model_fields,
                *(one.partition(".")[2] for one in user_set_fields if one.startswith(f"{name}.")),
            }
            config[name] = {member: value for member, value in config[name].items() if member in known}
    return config


def without_defaults(config: Mapping[str, Any], user_set_fields: set[str]) -> dict[str, Any]:
    """Return a stored configuration as a user would write it: without defaults, so that they conflict with nothing."""
    of_method = method_of(config).default_fields(config.get("lora_r"))
    # A value may be the default of other methods, which counts as not set, and differ from that of this one.
    user_set_fields = user_set_fields | {
        name for name, default in of_method.items() if config.get(name, default) != default
    }
    remaining: dict[str, Any] = {}
    for name, value in config.items():
        if name in GROUPS and isinstance(value, Mapping):
            members = {member: item for member, item in value.items() if f"{name}.{member}" in user_set_fields}
            if members:
                remaining[name] = members
        elif name in user_set_fields:
            remaining[name] = value
    return remaining


def normalize_numbers(config_input: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Convert text such as `"10k"` to numbers where a field accepts it; what cannot be parsed stays unchanged."""
    normalized = {}
    for name, value in config_input.items():
        if not group and name in GROUPS and isinstance(value, Mapping):
            normalized[name] = normalize_numbers(value, f"{name}.")
        else:
            number = _HUMAN_NUMBERS.get(f"{group}{name}")
            normalized[name] = value if number is None else number.parse_number(value)
    return normalized


def _flatten_groups(config_input: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config_input.items():
        if name in GROUPS and isinstance(value, Mapping):
            yield from ((f"{name}.{member}", item) for member, item in value.items())
        else:
            yield name, value


def _is_same(value: Any, default: Any) -> bool:
    # In Python, true equals 1.
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)


def _default_values(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    return {
        f"{prefix}{name}": field.get_default(call_default_factory=True)
        for name, field in model.model_fields.items()
        if not field.is_required()
    }


_NO_DEFAULT = object()

_DEFAULTS: dict[str, Any] = {
    **{name: value for name, value in _default_values(TrainingConfig).items() if name not in GROUPS},
    **{
        name: value
        for group, model in OPTION_GROUPS.items()
        for name, value in _default_values(model, f"{group}.").items()
    },
    **_default_values(TrainerOptions, "extra."),
}


_HUMAN_NUMBERS: dict[str, HumanNumber] = {
    **human_numbers(TrainingConfig),
    **{f"extra.{name}": number for name, number in human_numbers(TrainerOptions).items()},
    **{
        f"{group}.{name}": number
        for group, model in OPTION_GROUPS.items()
        for name, number in human_numbers(model).items()
    },
}


def is_probe(config: Mapping[str, Any]) -> bool:
    """Return True if a run is a probe, which only measures."""
    return (config.get("extra") or {}).get("probe") is True
