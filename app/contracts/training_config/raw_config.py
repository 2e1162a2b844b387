"""A configuration as the user wrote it: given fields, numbers, unknown fields."""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from app.contracts.human_numbers import HumanNumber
from app.contracts.methods import OPTION_GROUPS
from app.contracts.training_config.fields import TrainingConfig

GROUPS = (*OPTION_GROUPS, "extra")
"""Fields that contain fields."""

PROBE_STEPS = 2
"""Steps of a probe (`extra.probe`)."""


def given_fields(config_input: Mapping[str, Any]) -> set[str]:
    """Return the names of the fields that the user set, dotted within a group (`dpo.beta`)."""
    names = {name for name in config_input if name not in GROUPS}
    for group in GROUPS:
        members = config_input.get(group)
        if isinstance(members, Mapping):
            names |= {f"{group}.{member}" for member in members}
        elif group in config_input:
            names.add(group)
    return names


def drop_unknown_fields(stored: Mapping[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """Drop the defaults of fields that this version does not have from a stored configuration.

    During an upgrade, a newer API writes for older workers. Fields that the user set stay, and are rejected.
    """
    given = set(given)
    kept = {name: value for name, value in stored.items() if name in TrainingConfig.model_fields or name in given}
    for name, model in OPTION_GROUPS.items():
        if isinstance(kept.get(name), Mapping):
            known = {*model.model_fields, *(one.partition(".")[2] for one in given if one.startswith(f"{name}."))}
            kept[name] = {member: value for member, value in kept[name].items() if member in known}
    return kept


def normalize_numbers(config_input: Mapping[str, Any]) -> dict[str, Any]:
    """Convert text such as `"10k"` to numbers where a field accepts it; what cannot be parsed stays unchanged."""
    return {name: _FRIENDLY[name].number(value) if name in _FRIENDLY else value for name, value in config_input.items()}


def _friendly(annotations: Iterable[Any]) -> HumanNumber | None:
    return next((one for one in annotations if isinstance(one, HumanNumber)), None)


_FRIENDLY: dict[str, HumanNumber] = {
    name: friendly
    for name, field in TrainingConfig.model_fields.items()
    # A nullable field has its annotations one level down.
    for friendly in [
        _friendly([*field.metadata, *(one for arg in get_args(field.annotation) for one in get_args(arg)[1:])])
    ]
    if friendly is not None
}


def is_probe(config: Mapping[str, Any]) -> bool:
    """Return True if a run is a probe, which only measures."""
    return (config.get("extra") or {}).get("probe") is True
