"""Promises about the audit list: no change without a line of who made it, and in no line what was sent."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine

from anneal.contracts.schemas.administration.api_keys import KeyEdit
from app.api.dependencies import get_session
from app.api_keys.service import create_key_sync, edit_key_sync, list_keys_sync, revoke_key_sync
from app.audit.middleware import CHANGES_NOTHING
from app.config import Settings
from app.infra.ids import id_at
from app.main import create_app
from app.runs.retention import Policy, run_prune
from tests.app.routes import UNSAFE
from tests.factories import make_dataset, make_run
from tests.server import ApiServer
from tests.waiting import eventually

TOKEN = "token-of-ada-0123456789"


def listed(api: ApiServer, **query: Any) -> list[dict[str, Any]]:
    """The calls over HTTP, newest first."""
    answer = api.client.get("/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    return [call for call in answer.json()["data"] if call["method"] != "CLI"]


def execute(settings: Settings, statement: str) -> None:
    with psycopg.connect(settings.database_url or "", autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[arg-type]


def upload(api: ApiServer) -> Any:
    return api.client.post("/v1/datasets", files={"file": ("x.jsonl", b'{"text": "very private"}\n')})


def test_a_change_is_listed_with_who_what_and_when_and_without_what_was_sent(
    api: ApiServer, settings: Settings, engine: Engine
) -> None:
    key_id = list_keys_sync(settings)[0].id
    before = datetime.now(UTC) - timedelta(seconds=5)
    experiment = api.client.post("/v1/experiments", json={"name": "private"}).json()["id"]
    dataset = upload(api).json()["id"]
    run = make_run(api.client, make_dataset(engine))["id"]
    stopped = api.client.post(f"/v1/runs/{run}/stop", json={})
    api.client.put("/v1/secrets/hf_token", json={"value": TOKEN})
    api.client.delete(f"/v1/datasets/{dataset}")
    calls = listed(api)
    assert [(call["method"], call["route"], call["resource"], call["status"]) for call in reversed(calls)] == [
        ("POST", "/v1/experiments", experiment, 201),
        ("POST", "/v1/datasets", dataset, 201),
        ("POST", "/v1/runs", run, 202),
        ("POST", "/v1/runs/{run_id}/stop", run, 202),
        ("PUT", "/v1/secrets/{name}", "hf_token", 200),
        ("DELETE", "/v1/datasets/{dataset_id}", dataset, 204),
    ]
    assert {(call["key_id"], call["key_name"], call["address"]) for call in calls} == {(key_id, "test", "127.0.0.1")}
    assert calls[2]["request_id"] == stopped.headers["x-request-id"]
    assert all(datetime.fromisoformat(call["ts"]) > before for call in calls)
    everything = json.dumps(calls)
    assert "private" not in everything and TOKEN not in everything and api.key[7:] not in everything


def test_refused_calls_are_listed_and_those_that_change_nothing_are_not(api: ApiServer) -> None:
    nowhere = "run_" + "0" * 26
    assert api.client.delete(f"/v1/runs/{nowhere}").status_code == 404
    assert api.client.post("/v1/experiments?x=private", json={"nam": 1}).status_code == 422
    assert api.client.patch("/v1/nothing", json={}).status_code == 404
    assert api.client.post("/v1/runs/validate", json={"dataset_id": "x", "config": {}}).status_code == 200
    api.client.get("/v1/experiments")
    with api.client_with(api.key_with(["write"])) as writer:
        assert writer.delete("/v1/secrets/hf_token").status_code == 403
    with api.client_with(None) as untrusted:
        assert untrusted.delete("/v1/secrets/hf_token").status_code == 401
    # Those that changed nothing are written down behind their answers.
    eventually(lambda: len(listed(api)) >= 4)
    assert [(call["method"], call["route"], call["resource"], call["status"]) for call in reversed(listed(api))] == [
        ("DELETE", "/v1/runs/{run_id}", nowhere, 404),
        ("POST", "/v1/experiments", None, 422),
        ("PATCH", "unmatched", None, 404),
        ("DELETE", "/v1/secrets/{name}", "hf_token", 403),
    ]
    assert "private" not in json.dumps(listed(api))


def test_calls_that_change_nothing_are_sampled_and_every_change_is_listed(api: ApiServer, settings: Settings) -> None:
    began = time.monotonic()
    for _ in range(150):
        assert api.client.patch("/v1/nothing", json={}).status_code == 404
    assert api.client.post("/v1/experiments", json={"name": "made"}).status_code == 201
    with psycopg.connect(str(settings.database_url)) as connection:
        count = "SELECT count(*) FILTER (WHERE status = 404), count(*) FILTER (WHERE status = 201) FROM audit_log"
        refused, changes = connection.execute(count).fetchone() or (0, 0)
    assert 90 <= refused <= 101 + time.monotonic() - began and changes == 1


def test_every_call_that_changes_something_writes_it_in_its_own_transaction(settings: Settings) -> None:
    """By the one dependency that does so; an upload or mix holds no session while it runs, and does it in its own."""

    def uses_the_session(dependant: Any) -> bool:
        return any(one.call is get_session or uses_the_session(one) for one in dependant.dependencies)

    transactions = {}
    for included in create_app(settings).routes:
        for route in getattr(included, "effective_route_contexts", lambda: ())():
            for method in set(UNSAFE) & set(route.methods or ()):
                transactions[method, route.path] = uses_the_session(route.dependant)
    assert len(transactions) > 10
    alone = {call for call, uses in transactions.items() if not uses}
    uploads = {("POST", "/v1/datasets"), ("POST", "/v1/datasets/mix"), ("POST", "/openai/v1/files")}
    assert alone - CHANGES_NOTHING == uploads


@pytest.fixture
def unwritable(api: ApiServer, settings: Settings) -> Iterator[ApiServer]:
    """A server whose database takes everything but lines of the audit list; with an experiment and a secret."""
    api.client.post("/v1/experiments", json={"name": "x"}).raise_for_status()
    api.client.put("/v1/secrets/hf_token", json={"value": TOKEN}).raise_for_status()
    upload(api).raise_for_status()
    execute(settings, "ALTER TABLE audit_log ADD CONSTRAINT no_more CHECK (false) NOT VALID")
    yield api


def test_change_that_cannot_be_audited_is_rolled_back(unwritable: ApiServer, settings: Settings) -> None:
    client = unwritable.client
    (experiment,) = client.get("/v1/experiments").json()["data"]
    (dataset,) = client.get("/v1/datasets").json()["data"]
    files = sorted(settings.storage_root.rglob("data.jsonl"))
    answers = [
        client.delete(f"/v1/experiments/{experiment['id']}"),
        client.delete(f"/v1/datasets/{dataset['id']}"),
        client.delete("/v1/secrets/hf_token"),
        client.put("/v1/secrets/another", json={"value": TOKEN}),
        client.post("/v1/experiments", json={"name": "y"}),
        upload(unwritable),
        client.post("/v1/datasets/mix", json={"name": "m", "sources": [{"dataset_id": dataset["id"]}]}),
    ]
    assert [answer.status_code for answer in answers] == [500] * len(answers)
    assert client.get("/v1/experiments").json()["data"] == [experiment]
    assert client.get("/v1/datasets").json()["data"] == [dataset]
    assert [one["name"] for one in client.get("/v1/secrets").json()["data"]] == ["hf_token"]
    assert sorted(settings.storage_root.rglob("data.jsonl")) == files
    with pytest.raises(Exception, match="no_more"):
        create_key_sync(settings, "unwritten", ["admin"])
    key_id = list_keys_sync(settings)[0].id
    with pytest.raises(Exception, match="no_more"):
        revoke_key_sync(settings, key_id)
    with pytest.raises(Exception, match="no_more"):
        edit_key_sync(settings, key_id, KeyEdit(name="changed"))
    assert [(key.name, key.revoked_at) for key in list_keys_sync(settings)] == [("test", None)]


def test_a_refusal_that_cannot_be_written_down_is_in_the_log(
    unwritable: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    answer = unwritable.client.delete("/v1/secrets/nothing")
    assert answer.status_code == 404
    unwritable.stop()
    assert "not in the audit log" in caplog.text and answer.headers["x-request-id"] in caplog.text
    unwritable.start()


def test_keys_made_and_revoked_on_the_server_are_listed_too(api: ApiServer, settings: Settings) -> None:
    create_key_sync(settings, "laptop", ["read"])
    key_id = list_keys_sync(settings)[0].id
    assert edit_key_sync(settings, key_id, KeyEdit(max_devices=4)) is not None
    revoke_key_sync(settings, key_id)
    calls = api.client.get("/v1/audit", params={"resource": key_id}).json()["data"]
    assert [(call["method"], call["route"]) for call in calls] == [
        ("CLI", f"keys {command}") for command in ("revoke", "edit", "create")
    ]
    assert all(call["key_name"] and call["key_id"] is None for call in calls)


def test_the_list_is_filtered_and_paged(api: ApiServer, settings: Settings) -> None:
    ids = [api.client.post("/v1/experiments", json={"name": str(n)}).json()["id"] for n in range(5)]
    first = api.client.get("/v1/audit", params={"limit": 2}).json()
    assert [call["resource"] for call in first["data"]] == ids[:2:-1] and first["has_more"]
    rest = listed(api, after=first["data"][-1]["id"])
    assert [call["resource"] for call in rest] == ids[2::-1]
    assert [call["resource"] for call in listed(api, resource=ids[1])] == [ids[1]]
    key_id = first["data"][0]["key_id"]
    assert len(listed(api, key_id=key_id)) == 5 and listed(api, key_id="key_" + "0" * 26) == []
    now = datetime.now(UTC)
    assert len(listed(api, since=(now - timedelta(hours=1)).isoformat())) == 5
    assert listed(api, since=(now + timedelta(hours=1)).isoformat()) == []
    assert api.client.get("/v1/audit", params={"since": "yesterday"}).status_code == 422


def test_listing_from_before_the_first_call_has_every_call(api: ApiServer) -> None:
    api.client.post("/v1/experiments", json={"name": "x"})
    for since in ("1960-01-01T00:00:00Z", "0001-01-01T00:00:00Z"):
        assert api.client.get("/v1/audit", params={"since": since}).json()["data"], since


@pytest.mark.parametrize("scopes", [["read"], ["write"]])
def test_the_list_is_for_admins_alone(api: ApiServer, scopes: list[str]) -> None:
    with api.client_with(api.key_with(scopes)) as client:
        answer = client.get("/v1/audit")
    assert (answer.status_code, answer.json()["code"]) == (403, "scope_missing")


def test_lines_go_after_a_year(api: ApiServer, settings: Settings) -> None:
    now = datetime.now(UTC)
    for n in range(3):
        api.client.post("/v1/experiments", json={"name": str(n)})
    old = id_at("aud", now - timedelta(days=366))
    execute(settings, f"UPDATE audit_log SET id = '{old}' WHERE id = (SELECT max(id) FROM audit_log)")
    run_prune(settings, Policy(runs_days=10_000), dry_run=True)
    assert len(listed(api)) == 3
    run_prune(settings, Policy(runs_days=10_000), dry_run=False)
    assert len(listed(api)) == 2
