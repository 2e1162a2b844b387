"""Runs side by side: what differs, what does not, and what came of it."""

import pytest
from sqlalchemy import Engine

from app.config import Settings
from app.infra.ids import new_id
from tests.factories import Trainer, make_dataset, make_run, mark_run
from tests.server import ApiServer


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


def test_comparison_has_differing_fields_and_results_of_each_run(api: ApiServer, engine: Engine) -> None:
    dataset = make_dataset(engine)
    small = Trainer(engine, make_run(api.client, dataset, config={"lora_r": 8}, name="small")["id"]).begin()
    small.metric(1, loss=3.0)
    small.metric(2, loss=2.0)
    small.events("eval", {"step": 2, "metrics": {"loss": 2.5}})
    small.complete()
    two = make_run(api.client, dataset, config={"lora_r": 16})
    answer = api.client.get("/v1/runs/compare", params={"ids": f"{two['id']}, {small.run_id}"})
    assert answer.status_code == 200, answer.text
    comparison = answer.json()
    assert [run["run_id"] for run in comparison["runs"]] == [two["id"], small.run_id]
    assert comparison["differences"] == {"config.lora_r": {two["id"]: 16, small.run_id: 8}}
    assert comparison["common"]["config.base_model"] == "any" and comparison["common"]["dataset_id"] == dataset
    waiting, ended = comparison["runs"]
    assert (waiting["status"], waiting["seconds"], waiting["metrics"]) == ("pending", None, {})
    assert (ended["name"], ended["status"], ended["seconds"] >= 0) == ("small", "completed", True)
    assert ended["metrics"]["loss"] == {"last_step": 2, "last": 2.0, "min": 2.0, "max": 3.0}
    assert ended["metrics"]["eval.loss"]["last"] == 2.5


def test_comparison_has_differing_resources(api: ApiServer, engine: Engine) -> None:
    dataset = make_dataset(engine)
    first, second = (make_run(api.client, dataset)["id"] for _ in range(2))
    old_resources = {"devices": 2, "sharding": "full"}  # of a version without the other fields
    mark_run(engine, second, resources=old_resources, devices_needed=2)
    comparison = api.client.get("/v1/runs/compare", params={"ids": f"{first},{second}"}).json()
    assert comparison["differences"] == {
        "resources.devices": {first: 1, second: 2},
        "resources.sharding": {first: "auto", second: "full"},
    }
    assert (comparison["common"]["resources.hosts"], comparison["common"]["resources.labels"]) == (1, [])


def test_comparison_has_effective_values_and_those_changed_by_actions(api: ApiServer, engine: Engine) -> None:
    dataset = make_dataset(engine)
    first, second = (make_run(api.client, dataset)["id"] for _ in range(2))
    ids = {"ids": f"{first},{second}"}
    mark_run(engine, first, effective_config={"learning_rate": 1e-5, "max_steps": 70, "dtype": "bfloat16"})
    comparison = api.client.get("/v1/runs/compare", params=ids).json()
    assert comparison["differences"] == {
        "config.learning_rate": {first: 1e-5, second: 2e-4},
        "config.max_steps": {first: 70, second: None},
    }, "not the device's choice of a run that has started, beside one that has not"
    mark_run(engine, second, effective_config={"learning_rate": 1e-5, "max_steps": 70, "dtype": "float32"})
    comparison = api.client.get("/v1/runs/compare", params=ids).json()
    assert comparison["differences"] == {"config.dtype": {first: "bfloat16", second: "float32"}}


def test_comparison_warns_where_losses_are_incomparable(api: ApiServer, engine: Engine) -> None:
    chats, pairs = make_dataset(engine), make_dataset(engine, "preference", ("prompt", "chosen", "rejected"))
    qlora, lora = (make_run(api.client, chats, config={"method": method})["id"] for method in ("qlora", "lora"))
    dpo = make_run(api.client, pairs, config={"method": "dpo"})["id"]
    same, mixed = (
        api.client.get("/v1/runs/compare", params={"ids": f"{qlora},{other}"}).json() for other in (lora, dpo)
    )
    assert same["caution"] is None and [run["method"] for run in same["runs"]] == ["qlora", "lora"]
    assert "losses of `dpo` and `qlora` measure different things" in mixed["caution"]


def test_two_to_twenty_runs_that_there_are(api: ApiServer, engine: Engine) -> None:
    run = make_run(api.client, make_dataset(engine))["id"]
    for ids in ("", run, f"{run},{run}", ",".join(new_id("run") for _ in range(21))):
        assert api.client.get("/v1/runs/compare", params={"ids": ids}).status_code == 422
    missing = new_id("run")
    refused = api.client.get("/v1/runs/compare", params={"ids": f"{run},{missing}"})
    assert refused.status_code == 404 and missing in refused.json()["detail"]
