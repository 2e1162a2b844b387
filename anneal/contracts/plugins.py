"""Plugins that the operator has installed on the workers, as configurations name them.

Pure pydantic: the API validates with it; `worker/training/plugins/registry.py` loads the plugins.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from anneal.contracts.field_types import PluginName, json_length
from anneal.contracts.methods import rewards_of

PLUGINS = {
    "data_source": "anneal.data_sources",
    "model_factory": "anneal.model_factories",
    "optimizer": "anneal.optimizers",
    "scheduler": "anneal.schedulers",
    "checkpoint_engine": "anneal.checkpoint_engines",
    "reward": "anneal.rewards",
    "metrics": "anneal.metrics",
    "tokenizer": "anneal.tokenizers",
    "collator": "anneal.collators",
    "callback": "anneal.callbacks",
    "chat_template": "anneal.chat_templates",
}
"""Entry point groups by kind. A kind is also the field of `extra` that names a plugin, except for rewards, callbacks
(a list, `extra.callbacks`) and chat templates (`chat_template`)."""
_REPLACES = {
    "optimizer": ("optim", "extra.adam_beta1", "extra.adam_beta2", "extra.adam_epsilon", "extra.optim_args"),
    "scheduler": ("lr_scheduler_type", "extra.lr_scheduler_kwargs"),
}
_MOST_CHARACTERS = 8_000
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class Plugin(BaseModel):
    """A plugin, as `{"type": name}` with its parameters."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    type: PluginName

    @property
    def parameters(self) -> dict[str, Any]:
        """All fields except the name."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _not_too_long(self) -> "Plugin":
        if (length := json_length(self.model_extra)) is None:
            raise PydanticCustomError("bad_bounds", "must contain only valid JSON")
        if length > _MOST_CHARACTERS:
            message = "is too long: its parameters may have at most {most} characters of JSON"
            raise PydanticCustomError("out_of_range", message, {"most": f"{_MOST_CHARACTERS:,}"})
        return self


def named_plugins(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield field, kind and name of each plugin that a configuration names; malformed entries are skipped."""
    extra = config.get("extra")
    extra = extra if isinstance(extra, Mapping) else {}
    for kind in PLUGINS:
        value = extra.get(kind)
        if isinstance(value, Mapping) and isinstance(value.get("type"), str):
            yield f"extra.{kind}", kind, value["type"]
    callbacks = extra.get("callbacks")
    for place, value in enumerate(callbacks if isinstance(callbacks, list) else ()):
        if isinstance(value, Mapping) and isinstance(value.get("type"), str):
            yield f"extra.callbacks.{place}", "callback", value["type"]
    template = config.get("chat_template")
    if isinstance(template, str) and is_template_name(template):
        yield "chat_template", "chat_template", template
    metrics = extra.get("metrics")
    for name in metrics if isinstance(metrics, list) else ():
        if isinstance(name, str):
            yield "extra.metrics", "metrics", name
    for field, reward in rewards_of(config):
        if reward.get("type") == "plugin" and isinstance(reward.get("name"), str):
            yield f"{field}.name", "reward", reward["name"]


def is_template_name(template: str) -> bool:
    """Return True if a `chat_template` is the name of a plugin rather than Jinja text."""
    return _NAME.fullmatch(template) is not None


def checked_template(template: str) -> str:
    """Return a `chat_template` unchanged; raises `PydanticCustomError` if it is neither a name nor Jinja text."""
    if is_template_name(template) or "{{" in template or "{%" in template:
        return template
    message = "must be a Jinja template with {brackets}, or the name of an installed plugin"
    raise PydanticCustomError("bad_template", message, {"brackets": "`{{ … }}` or `{% … %}`"})


def controls_learning_rate(config: Mapping[str, Any]) -> bool:
    """Return True if a plugin determines the learning rates."""
    extra = config.get("extra") or {}
    return extra.get("optimizer") is not None or extra.get("scheduler") is not None


def has_replicas(config: Mapping[str, Any]) -> bool:
    """Return True if checkpoints that are missing from their folder may have a replica elsewhere."""
    return (config.get("extra") or {}).get("checkpoint_engine") is not None


def replaced_fields(config: Mapping[str, Any], user_set_fields: set[str]) -> Iterator[tuple[str, str]]:
    """Yield fields that were set although a plugin replaces them, with an error message."""
    for field, kind, name in named_plugins(config):
        for replaced in _REPLACES.get(kind, ()):
            if replaced in user_set_fields:
                yield (
                    replaced,
                    f"cannot be set together with `{field}`, because `{name}` replaces it: leave one of them out",
                )
