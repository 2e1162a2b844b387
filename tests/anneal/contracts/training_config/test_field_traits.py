"""Every configuration field declares its traits, and lists of fields follow from them."""

import pytest
from pydantic import BaseModel

from anneal.contracts.field_types import Traits
from anneal.contracts.methods import OPTION_GROUPS
from anneal.contracts.training_config import field_traits
from anneal.contracts.training_config.fields import TrainerOptions, TrainingConfig

FIELDS = [
    pytest.param(model, name, id=f"{model.__name__}.{name}")
    for model in (TrainingConfig, TrainerOptions, *OPTION_GROUPS.values())
    for name in model.model_fields
]


class TestTraits:
    @pytest.mark.parametrize(("model", "name"), FIELDS)
    def test_every_field_declares_its_traits_once(self, model: type[BaseModel], name: str) -> None:
        declared = [one for one in model.model_fields[name].metadata if isinstance(one, Traits)]
        assert len(declared) == 1, f"annotate {model.__name__}.{name} with Traits(...)"

    def test_all_are_collected(self) -> None:
        assert len(field_traits.TRAITS) == len(FIELDS)

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            (field_traits.CHANGEABLE_ON_RESUME, "learning_rate"),
            (field_traits.STEP_TIME, "batch_size"),
            (field_traits.DURATION, "epochs"),
            (field_traits.DURATION, "batch_size"),
            (field_traits.NOT_IN_PROBE, "extra.memory_profile"),
            (field_traits.ADAPTER_ONLY, "lora_alpha"),
            (field_traits.FOUR_BIT_ONLY, "extra.double_quant"),
            (field_traits.SUPERVISED_ONLY, "loss_on"),
            (field_traits.NEEDS_EVAL_DATA, "extra.eval_on_start"),
            (field_traits.NEEDS_SAMPLES, "sample_prompts"),
            (field_traits.DEPENDS_ON_METHOD, "load_in_4bit"),
        ],
    )
    def test_lists_follow_from_traits(self, fields: object, field: str) -> None:
        assert isinstance(fields, tuple | frozenset)
        assert field in fields
        assert "seed" not in fields
