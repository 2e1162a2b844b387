"""Endpoints of webhooks: what is stored and shown, and what is refused with which sentence."""

import base64
from typing import Any

import pytest
from sqlalchemy import Engine

from app.infra.ids import new_id
from app.webhooks.service import MOST_WEBHOOKS
from tests.app.webhooks.rows import add_webhook
from tests.factories import make_experiment
from tests.server import ApiServer
from tests.waiting import eventually

URL = "https://hooks.invalid/hook"


def test_webhook_is_created_changed_and_deleted_with_its_secret(emptied_api: ApiServer) -> None:
    client = emptied_api.client
    answer = client.post("/v1/webhooks", json={"url": f"{URL}?token=x"})
    created = answer.json()
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    assert created.pop("secret").startswith("whsec_")
    assert (created["name"], created["types"], created["filter"], created["format"]) == (
        "hooks.invalid", ["end"], {}, "standard"
    )  # fmt: skip
    path = answer.headers["location"]
    assert client.get(path).json() == created
    changed = client.patch(path, json={"types": ["end", "status"], "filter": {"tag": "llama"}, "enabled": False}).json()
    assert (changed["types"], changed["filter"], changed["enabled"]) == (["end", "status"], {"tag": "llama"}, False)
    assert changed["url"] == created["url"]
    assert client.post(f"{path}/test").json()["code"] == "webhook_disabled"
    assert client.patch(path, json={"enabled": True, "filter": {}}).json()["filter"] == {}
    assert client.post(f"{path}/test").status_code == 202
    assert [row["id"] for row in client.get("/v1/webhooks").json()["data"]] == [created["id"]]
    routes = {(row["method"], row["resource"]) for row in client.get("/v1/audit").json()["data"]}
    assert {("POST", created["id"]), ("PATCH", created["id"])} <= routes
    assert client.delete(path).status_code == 204
    assert client.get(path).json()["code"] == "webhook_not_found"
    assert client.get(f"{path}/deliveries").status_code == 404


def test_webhook_whose_experiment_is_deleted_can_be_disabled(emptied_api: ApiServer) -> None:
    client = emptied_api.client
    experiment = client.post("/v1/experiments", json={"name": "ends"}).json()["id"]
    filtered = {"url": URL, "filter": {"experiment_id": experiment}}
    path = client.post("/v1/webhooks", json=filtered).headers["location"]
    assert client.delete(f"/v1/experiments/{experiment}").status_code == 204
    assert client.patch(path, json={"enabled": False}).json()["enabled"] is False
    refused = client.patch(path, json={"filter": filtered["filter"]})
    assert refused.json()["errors"][0]["code"] == "experiment_not_found"


def test_secrets_of_webhooks_are_neither_listed_nor_deleted_as_those_of_runs(emptied_api: ApiServer) -> None:
    client = emptied_api.client
    webhook_id = client.post("/v1/webhooks", json={"url": URL}).json()["id"]
    assert client.get("/v1/secrets").json()["data"] == []
    assert client.delete(f"/v1/secrets/webhook:{webhook_id}").status_code == 404
    assert client.put(f"/v1/secrets/webhook:{webhook_id}", json={"value": "x" * 20}).status_code == 422


def test_webhook_whose_secret_cannot_be_decrypted_is_repaired_by_a_rotation(emptied_api: ApiServer) -> None:
    path = emptied_api.client.post("/v1/webhooks", json={"url": URL}).headers["location"]
    emptied_api.settings.secret_key_path.write_bytes(base64.b64encode(bytes(32)))
    delivery = emptied_api.client.post(f"{path}/test").headers["location"]
    error = eventually(lambda: emptied_api.client.get(delivery).json()["error"])
    assert "is not in this machine's key file" in error
    assert emptied_api.client.post(f"{path}/rotate").json()["secret"].startswith("whsec_")
    delivery = emptied_api.client.post(f"{path}/test").headers["location"]
    error = eventually(lambda: emptied_api.client.get(delivery).json()["error"])
    assert error.startswith("hooks.invalid cannot be resolved: correct the host in the URL of the webhook")


def test_key_without_the_scope_write_sees_no_path_of_an_address(emptied_api: ApiServer) -> None:
    webhook_id = emptied_api.client.post("/v1/webhooks", json={"url": URL, "format": "slack"}).json()["id"]
    with emptied_api.client_with(emptied_api.key_with(["read"])) as reader:
        assert reader.get(f"/v1/webhooks/{webhook_id}").json()["url"] == "https://hooks.invalid/…"
        assert reader.get("/v1/webhooks").json()["data"][0]["url"] == "https://hooks.invalid/…"
        assert reader.post(f"/v1/webhooks/{webhook_id}/rotate").status_code == 403


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({}, "url", "missing"),
        ({"url": "ftp://8.8.8.8/"}, "url", "invalid_url"),
        ({"url": "hooks"}, "url", "invalid_url"),
        ({"url": "https://"}, "url", "invalid_url"),
        ({"url": "https://8.8.8.8:99999/"}, "url", "invalid_url"),
        ({"url": "https://a b.example/"}, "url", "invalid_url"),
        ({"url": "https://user:password@8.8.8.8/"}, "url", "invalid_url"),
        ({"url": "https://8.8.8.8/#part"}, "url", "invalid_url"),
        ({"url": "https://8.8.8.8/" + "x" * 2000}, "url", "string_too_long"),
        ({"url": "http://8.8.8.8/"}, "url", "not_https"),
        ({"url": "https://10.0.0.1/"}, "url", "private_address"),
        ({"url": "https://localhost/"}, "url", "private_address"),
        ({"url": "https://2130706433/"}, "url", "private_address"),
        ({"url": "https://0x7f.1/"}, "url", "private_address"),
        ({"url": "https://169.254.169.254/latest"}, "url", "private_address"),
        ({"url": "https://[::ffff:10.0.0.1]/"}, "url", "private_address"),
        ({"types": ["metric"]}, "types.0", "literal_error"),
        ({"types": []}, "types", "too_short"),
        ({"format": "teams"}, "format", "literal_error"),
        ({"filter": {"color": "red"}}, "filter.color", "extra_forbidden"),
        ({"filter": {"status": ["done"]}}, "filter.status.0", "enum"),
        ({"filter": {"status": ["running"]}}, "filter.status", "never_reported"),
        ({"filter": {"experiment_id": "exp_0"}}, "filter.experiment_id", "experiment_not_found"),
        ({"filter": {"tag": "x" * 201}}, "filter.tag", "string_too_long"),
        ({"name": ""}, "name", "string_too_short"),
        ({"secret": "whsec_x"}, "secret", "extra_forbidden"),
    ],
)
def test_webhook_that_could_not_work_is_refused_by_field(
    shared_api: ApiServer, body: dict[str, Any], field: str, code: str
) -> None:
    answer = shared_api.client.post(
        "/v1/webhooks", json=body if body in ({},) or "url" in body else {"url": URL, **body}
    )
    assert answer.status_code == 422, answer.text
    assert (field, code) in [(error["field"], error["code"]) for error in answer.json()["errors"]]


def test_change_that_could_not_work_is_refused(emptied_api: ApiServer) -> None:
    client = emptied_api.client
    path = client.post("/v1/webhooks", json={"url": URL, "filter": {"status": ["failed"]}}).headers["location"]
    assert client.patch(path, json={"url": "https://10.0.0.1/"}).json()["errors"][0]["code"] == "private_address"
    never = client.patch(path, json={"filter": {"status": ["pending"]}})
    assert never.json()["errors"][0]["code"] == "never_reported"
    assert client.get(path).json()["filter"] == {"status": ["failed"]}


def test_name_that_cannot_be_resolved_yet_is_accepted(emptied_api: ApiServer) -> None:
    assert emptied_api.client.post("/v1/webhooks", json={"url": "https://hooks.invalid/x"}).status_code == 201


def test_what_does_not_exist_is_404(emptied_api: ApiServer) -> None:
    client = emptied_api.client
    path = client.post("/v1/webhooks", json={"url": URL}).headers["location"]
    assert client.get(f"{path}/deliveries/whd_0").json()["code"] == "delivery_not_found"
    assert client.post(f"{path}/deliveries/whd_0/redeliver").json()["code"] == "delivery_not_found"
    for method, rest in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/rotate"), ("POST", "/test")):
        answer = client.request(method, f"/v1/webhooks/{new_id('whk')}{rest}", json={} if method == "PATCH" else None)
        assert (answer.status_code, answer.json()["code"]) == (404, "webhook_not_found"), (method, rest)


def test_number_of_webhooks_is_limited(api: ApiServer, engine: Engine) -> None:
    experiment = make_experiment(engine)
    for _ in range(MOST_WEBHOOKS - 1):
        add_webhook(engine)
    body = {"url": URL, "filter": {"experiment_id": experiment}}
    assert api.client.post("/v1/webhooks", json=body).status_code == 201
    answer = api.client.post("/v1/webhooks", json=body)
    assert (answer.status_code, answer.json()["code"]) == (409, "too_many_webhooks")
