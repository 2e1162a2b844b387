"""Keys over HTTP: only an admin manages them, a key is shown once, and the last admin key stays."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from app.api_keys.service import create_key_sync, list_keys_sync, revoke_key_sync
from tests.server import ApiServer


def test_a_key_is_shown_once_and_works_until_it_is_revoked(api: ApiServer) -> None:
    answer = api.client.post("/v1/keys", json={"name": "laptop", "scopes": ["read", "read"], "expires_days": 2})
    created = answer.json()
    assert answer.status_code == 201 and created["scopes"] == ["read"] and created["key"].startswith(created["prefix"])
    assert answer.headers["cache-control"] == "no-store"
    with api.client_with(created["key"]) as client:
        assert client.get("/v1/experiments").status_code == 200
        refused = [client.get("/v1/keys"), client.get(answer.headers["location"])]
        assert {(one.status_code, one.json()["code"]) for one in refused} == {(403, "scope_missing")}
    shown = api.client.get(answer.headers["location"]).json()
    key, used = created.pop("key"), shown["last_used_at"]
    assert shown == {**created, "last_used_at": used} and key not in str(shown)
    assert used and shown["expires_at"] > shown["created_at"]
    listed = api.client.get("/v1/keys", params={"limit": 1})
    assert listed.json()["data"] == [shown] and listed.json()["has_more"] is True
    assert [api.client.delete(answer.headers["location"]).status_code for _ in range(2)] == [204, 204]
    assert api.client.get(answer.headers["location"]).json()["revoked_at"]
    calls = [
        (one["method"], one["route"], one["status"]) for one in api.client.get("/v1/audit").json()["data"]
        if one["resource"] == created["id"]
    ]  # fmt: skip
    assert calls == [("DELETE", "/v1/keys/{key_id}", 204)] * 2 + [("POST", "/v1/keys", 201)]
    missing = api.client.delete("/v1/keys/key_none")
    assert (missing.status_code, missing.json()["code"]) == (404, "key_not_found")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "name"), ({"name": ""}, "name"), ({"name": "x" * 201}, "name"), ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["root"]}, "scopes.0"), ({"name": "x", "scopes": "read"}, "scopes"),
        ({"name": "x", "expires_days": 0}, "expires_days"), ({"name": "x", "expires_days": 1e300}, "expires_days"),
        ({"name": "x", "key": "anneal_mine"}, "key"), ({"name": "x", "max_devices": -1}, "max_devices"),
        ({"name": "x", "max_devices": 1_000_001}, "max_devices"), ({"name": "x", "max_devices": True}, "max_devices"),
        ({"name": "x", "max_device_hours": -1}, "max_device_hours"),
        ({"name": "x", "max_device_hours": "4"}, "max_device_hours"),
    ],
)  # fmt: skip
def test_invalid_key_request_is_refused(shared_api: ApiServer, body: object, field: str) -> None:
    answer = shared_api.client.post("/v1/keys", json=body)
    assert answer.status_code == 422 and [one["field"] for one in answer.json()["errors"]] == [field]


def test_a_change_keeps_what_it_does_not_name_and_null_removes_the_quota(api: ApiServer) -> None:
    answer = api.client.post(
        "/v1/keys", json={"name": "laptop", "scopes": ["read"], "max_devices": 4, "max_device_hours": 9}
    )
    path, current = answer.headers["location"], answer.json()
    key = current.pop("key")
    assert current["max_devices"] == 4 and api.client.get(path).json() == current
    for change, expected in (
        ({"name": "tower"}, {"name": "tower"}), ({"max_devices": 0}, {"max_devices": 0}), ({"name": None}, {}),
        ({"max_device_hours": 0.5}, {"max_device_hours": 0.5}),
        ({"max_device_hours": None}, {"max_device_hours": None}),
        ({}, {}), ({"max_devices": None, "name": "any"}, {"max_devices": None, "name": "any"}),
    ):  # fmt: skip
        changed = api.client.patch(path, json=change)
        current |= expected
        assert (changed.status_code, changed.json()) == (200, current) and api.client.get(path).json() == current
    with api.client_with(key) as client:
        assert client.get("/v1/experiments").status_code == 200, "the key is the same"
    calls = api.client.get("/v1/audit", params={"resource": current["id"], "limit": 5}).json()["data"]
    assert [(one["method"], one["route"], one["status"]) for one in calls] == [("PATCH", "/v1/keys/{key_id}", 200)] * 5
    missing = api.client.patch("/v1/keys/key_none", json={"name": "x"})
    assert (missing.status_code, missing.json()["code"]) == (404, "key_not_found")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": ""}, "name"), ({"max_devices": -1}, "max_devices"), ({"max_devices": "4"}, "max_devices"),
        ({"scopes": ["admin"]}, "scopes"),
    ],
)  # fmt: skip
def test_a_change_that_makes_no_sense_is_refused(shared_api: ApiServer, body: object, field: str) -> None:
    key_id = shared_api.client.post("/v1/keys", json={"name": "x"}).json()["id"]
    answer = shared_api.client.patch(f"/v1/keys/{key_id}", json=body)
    assert answer.status_code == 422 and [one["field"] for one in answer.json()["errors"]] == [field]


def test_a_key_that_writes_does_not_change_its_own_quota(api: ApiServer) -> None:
    created = api.client.post("/v1/keys", json={"name": "x", "max_devices": 1}).json()
    with api.client_with(created["key"]) as client:
        refused = client.patch(f"/v1/keys/{created['id']}", json={"max_devices": None})
    assert (refused.status_code, refused.json()["code"]) == (403, "scope_missing")
    assert api.client.get(f"/v1/keys/{created['id']}").json()["max_devices"] == 1


def test_the_last_admin_key_is_never_revoked_however_many_try(api: ApiServer) -> None:
    own = next(key.id for key in list_keys_sync(api.settings) if "admin" in key.scopes)
    for key in list_keys_sync(api.settings):
        if key.id != own and "admin" in key.scopes:
            revoke_key_sync(api.settings, key.id)
    refused = api.client.delete(f"/v1/keys/{own}")
    assert (refused.status_code, refused.json()["code"]) == (409, "last_admin_key")
    assert "create another one first" in refused.json()["detail"]
    create_key_sync(api.settings, "other", ["admin"])
    other = list_keys_sync(api.settings)[0].id
    with ThreadPoolExecutor(2) as pool:
        statuses = list(pool.map(lambda id: api.client.delete(f"/v1/keys/{id}").status_code, [own, other]))
    assert sorted(statuses) == [204, 409]
    assert sum(key.revoked_at is None for key in list_keys_sync(api.settings) if "admin" in key.scopes) == 1
