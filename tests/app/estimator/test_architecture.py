"""A model's config.json is counted, or reported unknown, whatever is in it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.estimator import architecture, memory_planner
from app.estimator.activations import Precision
from app.estimator.architecture import UnknownArchitecture
from app.estimator.flops import estimate_flops
from app.estimator.parameters import CannotTrain, trainable_part
from app.estimator.steps import plan_steps
from tests.app.estimator.models import CHECKS, GIB, TINY, counted, effective
from tests.properties import examples

_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 100),
    st.sampled_from([2**39, 2**40, 10**400, -(10**400), 0.1, 1.5, float("nan"), float("inf"), "x", "", [], [1], {}]),
    st.dictionaries(st.sampled_from(["partial_rotary_factor", "rope_type"]), st.sampled_from(["x", None, 0.5, 7])),
    st.lists(st.integers(-1, 3), max_size=3),
)
_METHODS: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "lora", "lora_dropout": 0.0},
    {"method": "qlora", "packing": True},
    {"method": "dpo"},
    {"method": "reward", "lora_r": None},
    {"method": "rlhf", "lora_r": None, "rlhf": {"rewards": CHECKS, "beta": 0.1}},
]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ({"model_type": "phi3", "rope_scaling": "x"}, "a value has the wrong type"),
        ({"model_type": "phi3", "rope_parameters": [1]}, "a value has the wrong type"),
        ({"model_type": "phi3", "partial_rotary_factor": float("inf")}, "not a number from 0 to 1"),
        ({"model_type": "gpt2", "resid_pdrop": 10**400}, "not a number from 0 to 1"),
        ({"model_type": "gpt2", "attn_pdrop": float("nan")}, "not a number from 0 to 1"),
        ({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 16}, "16 attention heads exceed"),
        ({"model_type": "gpt2", "n_embd": 8, "n_head": 16}, "16 attention heads exceed"),
        ({"model_type": "llama", "num_key_value_heads": 64}, "more than the 32 attention heads"),
    ],
)
def test_impossible_config_json_is_reported_unknown(file: dict[str, Any], says: str) -> None:
    with pytest.raises(UnknownArchitecture, match=says) as raised:
        architecture.read_architecture(file)
    assert "Error:" not in str(raised.value)


@examples(75)
@given(st.data())
def test_any_config_json_is_counted_or_reported_unknown(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(architecture.FAMILIES)))
    known = {**architecture.FAMILIES[family], **TINY}
    names = st.sampled_from([*known, "rope_scaling", "rope_parameters", "num_key_value_heads", "head_dim", "n_inner"])
    file = {"model_type": family, **TINY, **data.draw(st.dictionaries(names, _ODD, min_size=1, max_size=3))}
    if isinstance(file.get("num_hidden_layers"), int):
        file["num_hidden_layers"] = min(file["num_hidden_layers"], 3)
    if isinstance(file.get("n_layer"), int):
        file["n_layer"] = min(file["n_layer"], 3)
    fields = data.draw(st.sampled_from(_METHODS))
    try:
        model, config = architecture.read_architecture(file), effective(**fields)
        trainable_part(model, config)
    except (UnknownArchitecture, CannotTrain) as error:
        assert str(error).endswith(".")
        return
    planned, precision = plan_steps(model, config, counted()), Precision.for_device(config, "cuda")
    choice = memory_planner.choose_checkpointing(model, config, precision, planned.batch, GIB)
    assert choice.memory.peak > 0 and min(choice.memory.as_megabytes().values()) >= 0
    todo = estimate_flops(model, config, planned, choice.checkpointing)
    assert todo is not None and todo.training >= 0
    if not choice.fits:
        memory_planner.MemoryAdvice(model, config, precision, planned.batch.length, planned.rows).advise_within(GIB)
