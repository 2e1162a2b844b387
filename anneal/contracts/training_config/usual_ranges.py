"""Warnings for values with which training rarely works: far outside the range that is usual for the method."""

from collections.abc import Iterator

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.field_traits import USUAL
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import field_error, wants_adapter

_HIGHEST_RATE_FACTOR = 10
_LOWEST_RATE_FACTOR = 1 / 100

_SCALES_FREELY = frozenset({"sgd", "adagrad"})
"""Optimizers whose steps are in proportion to the gradients, so that rates of other optimizers say nothing."""

_SCALE = (1 / 64, 16)
"""Usual factor of an adapter's output."""


def unusual_values(config: TrainingConfig) -> list[FieldError]:
    """Return a warning for each value that is far outside the usual range of the method."""
    return [*_unusual_rate(config), *_out_of_range(config)]


def _out_of_range(config: TrainingConfig) -> Iterator[FieldError]:
    has_adapter = wants_adapter(config)
    for name, (least, greatest) in USUAL.items():
        group, _, member = name.rpartition(".")
        if group and group != config.method:
            continue
        value = getattr(getattr(config, group) if group else config, member)
        is_used = has_adapter or not member.startswith("lora_")
        if is_used and value is not None and not least <= value <= greatest:
            usual = f"values from {least:g} to {greatest:g} are usual"
            yield field_error(name, "unusual_value", f"is {value:g}, and {usual}; check that it is intended")
    if has_adapter and config.lora_r is not None:
        scale = config.lora_alpha / (config.lora_r**0.5 if config.use_rslora else config.lora_r)
        if not _SCALE[0] <= scale <= _SCALE[1]:
            message = (
                f"is {config.lora_alpha}, so the adapter is scaled by {scale:g}, and factors from {_SCALE[0]:g} to "
                f"{_SCALE[1]:g} are usual; check that it is intended"
            )
            yield field_error("lora_alpha", "unusual_value", message)


def _unusual_rate(config: TrainingConfig) -> Iterator[FieldError]:
    if config.optim in _SCALES_FREELY or config.extra.get("optimizer") is not None:
        return
    default = METHODS[config.method].default_fields(config.lora_r)["learning_rate"]
    factor = config.learning_rate / default
    if _LOWEST_RATE_FACTOR <= factor <= _HIGHEST_RATE_FACTOR * (1 + 1e-9):
        return
    weights = "with an adapter" if wants_adapter(config) else "for all weights"
    if factor > 1:
        comparison, effect = f"{factor:,.4g} times", "training with it often diverges"
    else:
        comparison, effect = f"1/{1 / factor:,.4g} of", "the model hardly learns with it"
    message = (
        f"is {config.learning_rate:g}, {comparison} the default of method `{config.method}` {weights}, {default:g}, "
        f"and {effect}; leave it out to use the default"
    )
    yield field_error("learning_rate", "unusual_value", message)
