"""The README documents every field of the training configuration as in the code."""

from app.contracts.methods import DpoOptions, RlhfOptions
from app.contracts.training_config.fields import TrainerOptions, TrainingConfig
from docs.fields import README, table, written


def test_the_table_is_that_of_the_code() -> None:
    text = README.read_text()
    assert written(text) == text, "run `make docs`"


def test_it_names_every_field_once() -> None:
    rows = [line.split(" | ")[0].strip("| `") for line in table().splitlines()]
    groups = {"dpo": DpoOptions, "rlhf": RlhfOptions, "extra": TrainerOptions}
    wanted = {name for name in TrainingConfig.model_fields if name not in groups}
    wanted |= {f"{group}.{name}" for group, model in groups.items() for name in model.model_fields}
    assert wanted <= set(rows)
    assert all(rows.count(name) == 1 for name in wanted)


def test_a_table_that_is_out_of_date_is_replaced_and_nothing_else() -> None:
    text = README.read_text()
    assert written(text.replace("| `seed` |", "| `sead` |")) == text
