"""Which fields of a configuration count as given, and which are unknown."""

import pytest
from pydantic import ValidationError

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import drop_unknown_fields, given_fields, without_defaults


def test_given_fields_are_dotted_in_groups() -> None:
    config = {"seed": 1, "extra": {"max_grad_norm": 2}, "dpo": {"beta": 1}, "rlhf": {}}
    assert given_fields(config) == {"seed", "extra.max_grad_norm", "dpo.beta"}


def test_a_value_equal_to_the_default_is_not_given() -> None:
    for method in ("qlora", "dpo"):
        defaults = TrainingConfig.model_validate({"base_model": "tiny", "method": method}).model_dump(mode="json")
        assert given_fields(defaults) - {"method"} == {"base_model"}
    assert given_fields({"batch_size": "2**2", "packing": 0, "extra": {"max_rewinds": 3}}) == {"packing"}
    assert given_fields({"extra": 3, "dpo": None, "unheard_of": None}) == {"extra", "dpo", "unheard_of"}


def test_a_value_that_is_the_default_of_another_method_is_written_out() -> None:
    config = TrainingConfig(base_model="m", method="dpo", learning_rate=2e-4).model_dump(mode="json")
    assert without_defaults(config, {"base_model", "method"}) == {
        "base_model": "m", "method": "dpo", "learning_rate": 2e-4,
    }  # fmt: skip


def test_a_worker_of_the_version_before_passes_over_defaults_that_it_does_not_know() -> None:
    """While a service is updated, the API that writes configurations is newer than some of the workers."""
    stored = TrainingConfig(base_model="tiny").model_dump(mode="json") | {"of_tomorrow": "repair"}
    stored["rlhf"]["of_tomorrow"] = 1
    TrainingConfig.model_validate(drop_unknown_fields(stored, {"base_model"}))
    for user_set_field in ("of_tomorrow", "rlhf.of_tomorrow"):
        with pytest.raises(ValidationError, match="of_tomorrow"):
            TrainingConfig.model_validate(drop_unknown_fields(stored, {"base_model", user_set_field}))
