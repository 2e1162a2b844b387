"""The promise that no input, however odd, is answered with a 5xx or anything that is not documented."""

import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.infra.ids import new_id
from tests.server import ApiServer

_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
_ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.floats(), _TEXT,
    st.sampled_from([10**400, -1, 0, 1e308, "\0", "\ud800", "../x", "NaN", "1e5", "run_" + "0" * 26]),
)  # fmt: skip
_JSON = st.recursive(
    _ODD, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4), max_leaves=12
)
_MANY = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def document(shared_api: ApiServer) -> dict[str, Any]:
    openapi: dict[str, Any] = shared_api.client.get("/openapi.json").json()
    return openapi


def _operations(document: dict[str, Any], method: str) -> list[tuple[str, dict[str, Any]]]:
    operations = [(path, item[method]) for path, item in document["paths"].items() if method in item]
    assert operations
    return operations


def _check(answer: Any, operation: dict[str, Any], sent: object) -> None:
    assert answer.status_code < 500, (sent, answer.text)
    assert str(answer.status_code) in operation["responses"], (sent, answer.status_code)
    if answer.status_code >= 400:
        media_type, error = "application/problem+json", answer.json()
        if answer.request.url.path.startswith("/openai/"):
            media_type, error = "application/json", error["error"]
        assert answer.headers["content-type"] == media_type, sent
        assert error["code"] and len(answer.content) < 50_000


@_MANY
@given(data=st.data())
def test_every_body_is_answered_as_documented(
    shared_api: ApiServer, document: dict[str, Any], data: st.DataObject
) -> None:
    for path, operation in _operations(document, "post"):
        body = operation["requestBody"]["content"] if "requestBody" in operation else {}
        fields = _fields(document, body.get("application/json", {}).get("schema", {}))
        known = st.dictionaries(st.sampled_from(fields or ["x"]), _JSON, max_size=6)
        value = data.draw(st.one_of(known, _JSON))
        raw = json.dumps(value).encode()
        filled = path.replace("{run_id}", new_id("run"))
        _check(_post(shared_api, filled, raw), operation, (path, raw))


def _post(shared_api: ApiServer, path: str, raw: bytes) -> Any:
    return shared_api.client.post(path, content=raw, headers={"Content-Type": "application/json"})


def _fields(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    for option in schema.get("anyOf", [schema]):
        name = option.get("$ref", "").removeprefix("#/components/schemas/")
        if name:
            return sorted(document["components"]["schemas"][name].get("properties", {}))
    return []


@_MANY
@given(data=st.data())
def test_every_address_is_answered_as_documented(
    shared_api: ApiServer, document: dict[str, Any], data: st.DataObject
) -> None:
    ids = st.one_of(_TEXT, st.sampled_from(["x", "%00", "..", new_id("run"), new_id("exp"), "run_" + "z" * 26]))
    for path, operation in _operations(document, "get"):
        for parameter in (it for it in operation.get("parameters", []) if it["in"] == "path"):
            value = data.draw(ids)
            path = path.replace("{" + parameter["name"] + "}", quote(value or "-", safe="", errors="replace"))
        names = [it["name"] for it in operation.get("parameters", []) if it["in"] == "query"]
        query = {name: data.draw(_TEXT) for name in data.draw(st.sets(st.sampled_from(names)))} if names else {}
        if path.startswith("/v1/") and path.endswith("/events"):  # also below `..`, which a client resolves
            query["follow"] = "false"  # it would wait for ever
        pairs = "&".join(f"{name}={quote(value, safe='', errors='replace')}" for name, value in query.items())
        answer = shared_api.client.get(f"{path}?{pairs}")
        if "/../" not in path and answer.status_code != 404:  # a client resolves `..`, and lands elsewhere
            _check(answer, operation, (path, pairs))
        assert answer.status_code < 500, (path, pairs)


@_MANY
@given(body=st.binary(max_size=200))
def test_every_upload_is_answered_as_documented(shared_api: ApiServer, document: dict[str, Any], body: bytes) -> None:
    operation = document["paths"]["/v1/datasets"]["post"]
    framed = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + body + b"\r\n--b--\r\n"
    for sent in (body, framed):
        answer = shared_api.client.post(
            "/v1/datasets", content=sent, headers={"Content-Type": "multipart/form-data; boundary=b"}
        )
        _check(answer, operation, sent)
