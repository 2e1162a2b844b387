"""Promises about `resources.sequence_parallel`: what cannot be divided is refused at once, with what can."""

import json
from typing import Any

import pytest
from sqlalchemy import Engine

from app.config import Settings
from tests.factories import count_runs, make_dataset, make_model, make_run
from tests.rows import add_worker
from tests.server import ApiServer

# Llama with 12 heads of queries and 4 of keys and values.
_LLAMA = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 1536, "intermediate_size": 4096,
    "num_hidden_layers": 24, "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
}  # fmt: skip


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer, engine: Engine) -> ApiServer:
    """A service with eight GPUs in one worker, and a model that it can read."""
    (make_model(emptied_api.settings, "llama") / "config.json").write_text(json.dumps(_LLAMA))
    add_worker(engine, kind="cuda", backends=["celery"], memory_mb=[80_000] * 8)
    return emptied_api


def body(dataset: str, devices: int, parts: int, **config: Any) -> dict[str, Any]:
    return {
        "dataset_id": dataset, "backend": "celery", "config": {"base_model": "llama", "method": "lora", **config},
        "resources": {"devices": devices, "sequence_parallel": parts},
    }  # fmt: skip


def test_a_number_that_divides_neither_devices_nor_heads_is_refused_with_those_that_do(
    api: ApiServer, engine: Engine
) -> None:
    dataset = make_dataset(engine)
    for devices, parts, says in (
        (8, 3, "8 devices of the run: use one of 1, 2, 4, or change `resources.devices`"),
        (8, 8, "12 attention heads of the model: use one of 1, 2, 4"),
        (1, 2, "1 device of the run: use 1, or change `resources.devices`"),
        (6, 5, "6 devices of the run or the 12 attention heads of the model: use one of 1, 2, 3, 6"),
    ):
        answer = api.client.post("/v1/runs", json=body(dataset, devices, parts))
        (error,) = answer.json()["errors"]
        assert answer.status_code == 422
        message = f"is {parts}, which does not divide the {says}"
        assert error == {"field": "resources.sequence_parallel", "code": "does_not_divide", "message": message}
    unread = body(dataset, 6, 5) | {"config": {"base_model": "org/model"}}
    (error,) = api.client.post("/v1/runs", json=unread).json()["errors"]
    assert "6 devices of the run: use one of 1, 2, 3, 6," in error["message"], "the heads of the model are not known"
    assert count_runs(engine) == 0


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "dpo"}, ["`dpo` needs whole sequences"]),
        ({"neftune_noise_alpha": 5}, ["neftune_noise_alpha"]),
        ({"attn_implementation": "eager"}, ["attn_implementation"]),
    ],
)
def test_what_needs_whole_sequences_is_refused_together_with_what_does_not_divide(
    api: ApiServer, engine: Engine, config: dict[str, Any], says: list[str]
) -> None:
    dataset = make_dataset(engine, format="preference" if config.get("method") == "dpo" else "chat")
    errors = api.client.post("/v1/runs", json=body(dataset, 8, 8, **config)).json()["errors"]
    assert {error["field"] for error in errors} == {"resources.sequence_parallel"}
    assert [error["code"] for error in errors] == ["not_supported"] * len(says) + ["does_not_divide"]
    assert all(word in error["message"] for word, error in zip(says, errors, strict=False)), errors
    answer = api.client.post("/v1/runs/validate", json=body(dataset, 8, 1, **config)).json()
    assert answer["valid"], answer["errors"]


def test_devices_that_share_sequences_need_less_memory_each(api: ApiServer, engine: Engine) -> None:
    dataset = make_dataset(engine)
    more = {"max_seq_length": 65_536, "batch_size": 1, "on_out_of_memory": "stop", "gradient_checkpointing": True}
    alone, shared = (make_run(api.client, **body(dataset, 4, parts, **more)) for parts in (1, 4))
    assert (alone["requirements"]["sequence_parallel"], shared["requirements"]["sequence_parallel"]) == (1, 4)
    needs = [run["requirements"]["estimated_mb"]["cuda"] for run in (alone, shared)]
    assert needs[1] < needs[0] * 0.6, needs
    answers = [api.client.post("/v1/runs/estimate", json=body(dataset, 4, parts, **more)).json() for parts in (1, 4)]
    activations = [one["memory_mb"]["activations"] for one in answers]
    assert activations[1] < activations[0] * 0.3, activations
    assert "The activations of each sequence are divided among 4 devices." in answers[1]["assumptions"]
    assert answers[1]["steps"] > answers[0]["steps"], "a step has the rows of one device"
