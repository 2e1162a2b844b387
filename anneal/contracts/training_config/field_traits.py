"""Configuration fields by their traits, which are declared with the fields; fields of a group have dotted names."""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from anneal.contracts.field_types import Traits
from anneal.contracts.methods import OPTION_GROUPS
from anneal.contracts.training_config.fields import TrainerOptions, TrainingConfig


def _declared_traits(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Traits]]:
    for name, field in model.model_fields.items():
        yield from ((f"{prefix}{name}", one) for one in field.metadata if isinstance(one, Traits))


TRAITS: Mapping[str, Traits] = dict(
    [
        *_declared_traits(TrainingConfig),
        *(one for group, model in OPTION_GROUPS.items() for one in _declared_traits(model, f"{group}.")),
        *_declared_traits(TrainerOptions, "extra."),
    ]
)

CHANGEABLE_ON_RESUME = frozenset(name for name, traits in TRAITS.items() if traits.changeable_on_resume)

STEP_TIME = tuple(name for name, traits in TRAITS.items() if traits.affects == "step_time")

DURATION = tuple(name for name, traits in TRAITS.items() if traits.affects is not None)

NOT_IN_PROBE = frozenset(name for name, traits in TRAITS.items() if not traits.in_probe)

ADAPTER_ONLY = tuple(name for name, traits in TRAITS.items() if traits.adapter_only)

FOUR_BIT_ONLY = tuple(name for name, traits in TRAITS.items() if traits.four_bit_only)

SUPERVISED_ONLY = tuple(name for name, traits in TRAITS.items() if traits.supervised_only)

NEEDS_EVAL_DATA = tuple(name for name, traits in TRAITS.items() if traits.needs_eval_data)

NEEDS_SAMPLES = tuple(name for name, traits in TRAITS.items() if traits.needs_samples)

USUAL = {name: traits.usual for name, traits in TRAITS.items() if traits.usual is not None}

DEPENDS_ON_METHOD = frozenset(name for name, traits in TRAITS.items() if traits.depends_on_method)
