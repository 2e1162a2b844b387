"""Promises about `resources.expert_parallel`: what cannot be divided is refused at once, with what can."""

import json
from typing import Any

import pytest
from sqlalchemy import Engine

from app.config import Settings
from tests.factories import count_runs, make_dataset, make_model, make_run
from tests.rows import add_worker
from tests.server import ApiServer

_DENSE = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 4, "num_attention_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
_MIXTURE = {**_DENSE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
_ATTENTION = {"target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer, engine: Engine) -> ApiServer:
    """A service with sixteen GPUs in one worker, and two models that it can read."""
    for name, config in (("mixture", _MIXTURE), ("dense", _DENSE)):
        (make_model(emptied_api.settings, name) / "config.json").write_text(json.dumps(config))
    add_worker(engine, kind="cuda", backends=["celery"], memory_mb=[80_000] * 16)
    return emptied_api


def body(dataset: str, devices: int, experts: int, sharding: str = "auto", **config: Any) -> dict[str, Any]:
    return {
        "dataset_id": dataset, "backend": "celery",
        "config": {"base_model": "mixture", "method": "lora", **_ATTENTION, **config},
        "resources": {"devices": devices, "expert_parallel": experts, "sharding": sharding},
    }  # fmt: skip


def test_a_number_that_divides_neither_devices_nor_experts_is_refused_with_those_that_do(
    api: ApiServer, engine: Engine
) -> None:
    dataset = make_dataset(engine)
    cases = (
        (8, 3, "mixture", "use one of 1, 2, 4, 8"),
        (1, 2, "mixture", "use one of 1"),
        (6, 2, "mixture", "needs a number of devices that divides the 8 experts of the model: 2, 4, 8"),
        (16, 8, "mixture", "needs a number of devices that divides the 8 experts of the model: 2, 4, 8"),
        (6, 4, "org/model", "use one of 1, 2, 3, 6"),
    )
    for devices, experts, model, says in cases:
        answer = api.client.post("/v1/runs", json=body(dataset, devices, experts, base_model=model))
        (error,) = answer.json()["errors"]
        assert (answer.status_code, error["code"]) == (422, "does_not_divide")
        assert error["field"] == "resources.expert_parallel" and error["message"].endswith(says), error
    assert count_runs(engine) == 0


@pytest.mark.parametrize(
    ("config", "sharding", "says"),
    [
        ({"base_model": "dense"}, "auto", "has no experts that can be divided"),
        ({"method": "dpo"}, "auto", "`dpo` cannot divide experts"),
        ({"method": "qlora"}, "auto", "4 or 8 bits"),
        ({"target_modules": None}, "auto", "set `target_modules`"),
        ({}, "none", "set `resources.sharding` to `full` or `auto`"),
    ],
)
def test_what_cannot_divide_experts_is_refused(
    api: ApiServer, engine: Engine, config: dict[str, Any], sharding: str, says: str
) -> None:
    dataset = make_dataset(engine, format="preference" if config.get("method") == "dpo" else "chat")
    errors = api.client.post("/v1/runs", json=body(dataset, 2, 2, sharding, **config)).json()["errors"]
    messages = [one["message"] for one in errors if one["field"] == "resources.expert_parallel"]
    assert any(says in message for message in messages), errors
    answer = api.client.post("/v1/runs/validate", json=body(dataset, 2, 1, sharding, **config)).json()
    assert answer["valid"], answer["errors"]


def test_expert_parallel_error_of_a_dense_model_names_only_missing_experts(api: ApiServer, engine: Engine) -> None:
    wrong = body(make_dataset(engine), 2, 2, "none", base_model="dense", method="qlora", target_modules=None)
    (error,) = api.client.post("/v1/runs", json=wrong).json()["errors"]
    assert error["code"] == "not_supported" and "has no experts that can be divided" in error["message"]


def test_devices_that_share_experts_divide_the_model_and_need_less_memory_each(api: ApiServer, engine: Engine) -> None:
    dataset = make_dataset(engine)
    more = {"method": "full", "target_modules": None, "max_seq_length": 512, "batch_size": 1}
    more |= {"on_out_of_memory": "stop", "gradient_checkpointing": True}
    alone = make_run(api.client, **body(dataset, 4, 1, "full", **more))
    shared = make_run(api.client, **body(dataset, 4, 4, **more))
    assert shared["requirements"]["sharded"] and shared["requirements"]["expert_parallel"] == 4
    needs = [run["requirements"]["estimated_mb"]["cuda"] for run in (alone, shared)]
    # Two layers of 8 experts with three matrices of 1024 x 4096, and the gradients of one, 4 bytes each.
    assert needs[0] - needs[1] == pytest.approx(3 * 8 * 3 * 1024 * 4096 * 4 / 2**20, abs=2)
    estimate = api.client.post("/v1/runs/estimate", json=body(dataset, 4, 4, **more)).json()
    says = "The experts of a layer are divided among 4 devices, which get equal numbers of tokens."
    assert says in estimate["assumptions"]
    answer = api.client.post("/v1/runs/validate", json=body(dataset, 4, 2, **more, modules_to_save=["lm_head"]))
    assert not answer.json()["valid"]


def test_devices_that_share_experts_may_share_sequences(api: ApiServer, engine: Engine) -> None:
    """In groups of other sizes; the estimate counts both divisions."""
    dataset = make_dataset(engine)
    more = {"max_seq_length": 4096, "batch_size": 1, "on_out_of_memory": "stop", "gradient_checkpointing": True}
    alone, both = (body(dataset, 4, 4, **more) for _ in range(2))
    both["resources"]["sequence_parallel"] = 2
    needs = [make_run(api.client, **asked)["requirements"] for asked in (alone, both)]
    assert (needs[1]["expert_parallel"], needs[1]["sequence_parallel"]) == (4, 2)
    assert needs[1]["estimated_mb"]["cuda"] < needs[0]["estimated_mb"]["cuda"]
    assumptions = api.client.post("/v1/runs/estimate", json=both).json()["assumptions"]
    assert "The experts of a layer are divided among 4 devices, which get equal numbers of tokens." in assumptions
    assert "The activations of each sequence are divided among 2 devices." in assumptions
