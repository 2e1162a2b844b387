"""Promises about requests that change several runs: each has an outcome of its own, and its own entry in the audit."""

from typing import Any

import pytest
from sqlalchemy import Engine

from anneal.contracts.schemas.runs.requests import MOST_TAGS
from app.config import Settings
from tests.factories import Trainer, make_dataset, make_run, mark_run
from tests.server import ApiServer


@pytest.fixture
def settings(shared_api: ApiServer) -> Settings:
    return shared_api.settings


@pytest.fixture
def dataset(engine: Engine) -> str:
    return make_dataset(engine)


def change(api: ApiServer, verb: str, ids: list[str], **body: Any) -> dict[str, tuple[str, str | None]]:
    answer = api.client.post(f"/v1/runs/{verb}", json={"ids": ids, **body})
    assert answer.status_code == 200, answer.text
    runs = answer.json()["runs"]
    assert [run["id"] for run in runs] == list(dict.fromkeys(ids)), "in the order of the request"
    assert all((run["code"] is None) == (run["detail"] is None) for run in runs)
    return {run["id"]: (run["outcome"], run["code"]) for run in runs}


def test_stop_changes_live_runs_and_leaves_those_that_ended_meanwhile(
    emptied_api: ApiServer, engine: Engine, dataset: str
) -> None:
    api = emptied_api
    ended = Trainer(engine, make_run(api.client, dataset)["id"]).begin()
    ended.complete()
    trains = Trainer(engine, make_run(api.client, dataset)["id"]).begin()
    waits = make_run(api.client, dataset)["id"]
    unknown = "run_" + "0" * 26
    ids = [ended.run_id, waits, unknown, trains.run_id, waits]
    assert change(api, "stop", ids, mode="discard") == {
        ended.run_id: ("unchanged", "run_has_ended"),
        waits: ("changed", None),
        unknown: ("refused", "run_not_found"),
        trains.run_id: ("changed", None),
    }
    assert change(api, "stop", [waits, trains.run_id]) == {
        waits: ("unchanged", None),
        trains.run_id: ("unchanged", None),
    }
    shown = {run["id"]: run for run in api.client.get("/v1/runs").json()["data"]}
    assert shown[waits]["status"] == "cancelled" and shown[trains.run_id]["stop_mode"] == "discard"
    audit = api.client.get("/v1/audit").json()["data"]
    assert [(entry["route"], entry["resource"]) for entry in audit[:2]] == [
        ("/v1/runs/stop", resource) for resource in sorted([waits, trains.run_id])
    ]
    assert sum(entry["route"] == "/v1/runs/stop" for entry in audit) == 2


def test_delete_removes_a_run_after_those_that_need_it_and_keeps_the_others(
    emptied_api: ApiServer, engine: Engine, dataset: str
) -> None:
    api = emptied_api
    parent = Trainer(engine, make_run(api.client, dataset)["id"]).begin()
    parent.checkpoint(10)
    parent.fail()
    resumed = api.client.post(f"/v1/runs/{parent.run_id}/resume", json={}).json()["id"]
    assert change(api, "delete", [parent.run_id, resumed]) == {
        parent.run_id: ("refused", "run_is_needed"),
        resumed: ("refused", "run_is_live"),
    }
    change(api, "stop", [resumed])
    pinned = make_run(api.client, dataset)["id"]
    change(api, "stop", [pinned])
    mark_run(engine, pinned, pinned=True)
    assert change(api, "delete", [parent.run_id, pinned, resumed]) == {
        parent.run_id: ("changed", None),
        pinned: ("refused", "run_is_pinned"),
        resumed: ("changed", None),
    }
    assert change(api, "delete", [resumed]) == {resumed: ("unchanged", "run_not_found")}
    assert [run["id"] for run in api.client.get("/v1/runs").json()["data"]] == [pinned]


def test_tag_adds_and_removes_in_any_status(emptied_api: ApiServer, engine: Engine, dataset: str) -> None:
    api = emptied_api
    first, second = (make_run(api.client, dataset, tags=tags)["id"] for tags in (["a", "b"], ["c"]))
    full = make_run(api.client, dataset, tags=[str(number) for number in range(MOST_TAGS)])["id"]
    change(api, "stop", [first])
    assert change(api, "tag", [first, second, full], add=["c", "d"], remove=["a"]) == {
        first: ("changed", None), second: ("changed", None), full: ("refused", "too_many_tags"),
    }  # fmt: skip
    shown = {run["id"]: run["tags"] for run in api.client.get("/v1/runs").json()["data"]}
    assert (shown[first], shown[second]) == (["b", "c", "d"], ["c", "d"])
    assert change(api, "tag", [second], remove=["x"]) == {second: ("unchanged", None)}


@pytest.mark.parametrize(
    ("verb", "body", "field"),
    [
        ("stop", {"ids": []}, "ids"),
        ("stop", {"ids": ["x"] * 101}, "ids"),
        ("stop", {"ids": [7]}, "ids.0"),
        ("stop", {"ids": ["x"], "mode": "epoch_end", "deadline_seconds": 1}, ""),
        ("delete", {"ids": ["x"], "cascade": True}, "cascade"),
        ("tag", {"ids": ["x"]}, ""),
        ("tag", {"ids": ["x"], "add": ["a"], "remove": ["a"]}, ""),
        ("tag", {"ids": ["x"], "add": [""]}, "add.0"),
    ],
)
def test_a_wrong_request_is_refused_with_its_field(
    shared_api: ApiServer, verb: str, body: dict[str, Any], field: str
) -> None:
    answer = shared_api.client.post(f"/v1/runs/{verb}", json=body)
    assert answer.status_code == 422 and answer.json()["errors"][0]["field"] == field, answer.text


def test_a_key_that_only_reads_changes_nothing(shared_api: ApiServer, engine: Engine, dataset: str) -> None:
    run_id = make_run(shared_api.client, dataset)["id"]
    with shared_api.client_with(shared_api.key_with(["read"])) as reader:
        for verb, more in (("stop", {}), ("delete", {}), ("tag", {"add": ["x"]})):
            assert reader.post(f"/v1/runs/{verb}", json={"ids": [run_id], **more}).status_code == 403
    assert shared_api.client.get(f"/v1/runs/{run_id}").json()["status"] == "pending"
    change(shared_api, "stop", [run_id])
