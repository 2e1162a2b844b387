"""Promises about everything that is not a success."""

import errno
import json
import socket
from typing import Any

import psycopg
import pytest
import sqlalchemy.exc

from anneal.contracts.errors import FieldError
from app.api import errors
from app.api.errors import ApiError
from app.config import Settings
from app.infra.ids import new_id
from tests.server import ApiServer, ThreadServer

FIELDS = {"type", "title", "status", "detail", "code", "request_id"}


def _check(answer: Any, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body.keys() - {"errors"} == FIELDS
    assert body["code"] == code
    assert body["status"] == status
    assert body["request_id"] == answer.headers["x-request-id"]
    assert body["detail"].endswith((".", "!"))
    return body


def test_an_unknown_path_is_a_problem(shared_api: ApiServer) -> None:
    body = _check(shared_api.client.get("/v1/nowhere"), 404, "not_found")
    assert body["title"] == "Not Found"


def test_a_wrong_method_says_which_are_right(shared_api: ApiServer) -> None:
    for method, path, right in (
        ("PUT", "/v1/runs", "GET, POST"),
        ("PUT", "/v1/runs/run_1", "DELETE, GET, PATCH"),
        ("DELETE", "/v1/workers", "GET"),
    ):
        answer = shared_api.client.request(method, path)
        _check(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == right
    _check(shared_api.client.put("/v1/nothing"), 404, "not_found")


def test_an_unknown_id_is_named_with_a_way_on(shared_api: ApiServer) -> None:
    id = new_id("exp")
    body = _check(shared_api.client.get(f"/v1/experiments/{id}"), 404, "experiment_not_found")
    assert id in body["detail"] and "GET /v1/experiments" in body["detail"]


CONFIG = {"base_model": "x"}


def test_every_wrong_field_is_named_at_once(shared_api: ApiServer) -> None:
    answer = shared_api.client.post("/v1/experiments", json={"name": 7, "tags": ["ok", 3], "surprise": True})
    body = _check(answer, 422, "invalid_request")
    assert {item["field"] for item in body["errors"]} == {"name", "tags.1", "surprise"}
    assert all(item["code"] and item["message"] for item in body["errors"])
    assert body["detail"].endswith(". `errors` has 2 more. Correct it and send the request again.")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"nmae": "x", "dataset_id": "ds_1", "config": CONFIG}, "is not a field of this request; perhaps `name`"),
        (
            {"lora_r": 8, "dataset_id": "ds_1", "config": CONFIG},
            "is not a field of this request; perhaps `config.lora_r`",
        ),
        (
            {"max_steps": 8, "dataset_id": "ds_1", "config": CONFIG},
            "is not a field of this request; perhaps `config.max_steps`",
        ),
        (
            {"devices": 2, "dataset_id": "ds_1", "config": CONFIG},
            "is not a field of this request; perhaps `resources.devices`",
        ),
        (
            {"gpus": 2, "dataset_id": "ds_1", "config": CONFIG},
            "is not a field of this request; perhaps `resources.devices`",
        ),
        (
            {"resources": {"device": 2}, "dataset_id": "ds_1", "config": CONFIG},
            "is not a resource; perhaps `resources.devices`",
        ),
        (
            {"resources": {"devises": 2}, "dataset_id": "ds_1", "config": CONFIG},
            "is not a resource; perhaps `resources.devices`",
        ),
        ({"resources": {"zzz": 2}, "dataset_id": "ds_1", "config": CONFIG}, "is not a resource; leave it out"),
        (
            {"resources": {"labels": "a"}, "dataset_id": "ds_1", "config": CONFIG},
            'must be a list, such as `["a", "b"]`',
        ),
        ({"zzz": 8, "dataset_id": "ds_1", "config": CONFIG}, "is not a field of this request; leave it out"),
        ({"dataset_id": 1, "config": CONFIG}, "must be a valid string"),
        ({"config": CONFIG}, "is required"),
        ([], "the body must be a JSON object with fields and values"),
        (None, "the body is required"),
        (
            {"resources": {"devices": "two"}, "dataset_id": "ds_1", "config": CONFIG},
            "must be a number from 1 to 1,024, or `all`",
        ),
    ],
)
def test_field_error_is_a_plain_sentence(shared_api: ApiServer, body: Any, message: str) -> None:
    errors = _check(shared_api.client.post("/v1/runs", json=body), 422, "invalid_request")["errors"]
    assert [item["message"] for item in errors] == [message]


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/runs/validate", "/v1/runs/estimate"])
def test_errors_of_the_configuration_are_reported_with_those_beside_it(shared_api: ApiServer, path: str) -> None:
    def fields(**changes: Any) -> set[str]:
        body = {"dataset_id": "ds_1", "resources": {"devises": 2}, "config": {"base_model": "x", "epochs": 0}}
        answer = shared_api.client.post(path, json={**body, **changes})
        return {item["field"] for item in _check(answer, 422, "invalid_request")["errors"]}

    assert fields() == {"resources.devises", "config.epochs"}
    assert fields(dataset_id=7, config={"learnig_rate": 1, "batch_size": 0}) == {
        "dataset_id", "resources.devises", "config.base_model", "config.learnig_rate", "config.batch_size",
    }  # fmt: skip
    assert fields(backend="fake", config={"base_model": "x", "extra": {"steps": 3}}) == {"resources.devises"}
    assert fields(backend=["x"]) == {"backend", "resources.devises", "config.epochs"}
    assert fields(config=7) == {"resources.devises", "config"}
    assert fields(config={"base_model": "x" * 70_000}) == {"resources.devises", "config"}


def test_a_parameter_that_a_call_does_not_have_is_refused(shared_api: ApiServer) -> None:
    for query, near in (("stauts=failed", "perhaps `status`"), ("zzz=1&limit=1", "the parameters are `after`, ")):
        body = _check(shared_api.client.get(f"/v1/runs?{query}"), 422, "invalid_request")
        (error,) = body["errors"]
        assert (error["field"], error["code"]) == (query.partition("=")[0], "unknown_parameter")
        assert near in error["message"]
    id = shared_api.client.post("/v1/experiments", json={"name": "x"}).json()["id"]
    refused = shared_api.client.delete(f"/v1/experiments/{id}?cascade=true&dry_run=true")
    assert _check(refused, 422, "invalid_request")["errors"][0]["field"] == "dry_run"
    assert shared_api.client.get(f"/v1/experiments/{id}").status_code == 200


def test_a_wrong_query_is_named(shared_api: ApiServer) -> None:
    for query, field in (("limit=0", "limit"), ("limit=201", "limit"), ("limit=x", "limit"), ("after=1", "after")):
        body = _check(shared_api.client.get(f"/v1/experiments?{query}"), 422, "invalid_request")
        assert [item["field"] for item in body["errors"]] == [field]


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/runs/validate", "/v1/runs/estimate"])
def test_very_many_values_and_a_huge_configuration_are_refused(shared_api: ApiServer, path: str) -> None:
    many = shared_api.client.post(path, json={f"k{number}": number for number in range(10_001)})
    huge = shared_api.client.post(path, json={"dataset_id": "ds_1", "config": {"base_model": "x" * 66_000}})
    for answer, field, code in ((many, "", "too_many_values"), (huge, "config", "config_too_large")):
        errors = _check(answer, 422, "invalid_request")["errors"]
        assert [(error["field"], error["code"]) for error in errors] == [(field, code)]
        assert errors[0]["message"].endswith((".", "options", "it"))


def test_huge_input_is_never_sent_back(shared_api: ApiServer) -> None:
    huge = "x" * 900_000
    for body in ({"name": huge}, {huge: 1}, {"name": "x", "tags": [huge]}, {"name": [huge]}):
        answer = shared_api.client.post("/v1/experiments", json=body)
        assert answer.status_code == 422
        assert len(answer.content) < 5000
    many = shared_api.client.post("/v1/experiments", json={f"field{number}": 1 for number in range(20_000)})
    assert many.status_code == 422 and len(many.json()["errors"]) <= 100


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"name": "a\\u0000b"}', "nul_in_text"),
        (b'{"name": "a\\ud800b"}', "lone_surrogate"),
        (b'{"na\\u0000me": "ab"}', "nul_in_text"),
        (b'{"name": "a\x00b"}', "invalid_json"),
        (b'{"name": "\xed\xa0\x80"}', "not_utf8"),
        (b'{"name": "\xff"}', "not_utf8"),
        (b'{"name": "x", "name": "y"}', "duplicate_key"),
        (b'{"name": NaN}', "not_finite"),
        (b'{"name": 1e999}', "not_finite"),
        (b'{"name": ' + b"9" * 5000 + b"}", "number_too_long"),
        (b'{"name": ' + b"[" * 32 + b"]" * 32 + b"}", "too_deep"),
        (b"[" * 9_000, "too_deep"),
        (b'{"a":' * 9_000 + b"1" + b"}" * 9_000, "too_deep"),
        (b"[" * 400_000, "too_many_values"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "too_many_values"),
        (b"{", "invalid_json"),
        (b"nonsense", "invalid_json"),
    ],
)
def test_text_that_cannot_be_kept_and_malformed_json_are_422(shared_api: ApiServer, raw: bytes, code: str) -> None:
    answer = shared_api.client.post("/v1/experiments", content=raw, headers={"Content-Type": "application/json"})
    body = _check(answer, 422, "invalid_request")
    assert body["errors"][0]["code"] == code


def test_thirty_two_levels_are_read(shared_api: ApiServer) -> None:
    raw = b'{"name": ' + b"[" * 31 + b"]" * 31 + b"}"
    answer = shared_api.client.post("/v1/experiments", content=raw, headers={"Content-Type": "application/json"})
    assert answer.json()["errors"][0]["code"] == "string_type"


def test_whole_characters_beyond_the_basic_plane_are_kept(shared_api: ApiServer) -> None:
    raw = b'{"name": "\\ud83d\\ude00 \xf0\x9f\x98\x80", "description": "a\\tb"}'
    answer = shared_api.client.post("/v1/experiments", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 201
    assert answer.json()["name"] == "😀 😀"


@pytest.mark.parametrize("path", ["/v1/experiments/%00", "/v1/experiments?after=%00", "/v1/datasets/a%00b"])
def test_nul_in_an_address_is_422(shared_api: ApiServer, path: str) -> None:
    _check(shared_api.client.get(path), 422, "invalid_request")


@pytest.mark.parametrize("path", ["/v1/experiments/%ff%fe", "/v1/experiments/%ed%a0%80", "/v1/datasets/" + "x" * 5000])
def test_an_odd_id_is_404(shared_api: ApiServer, path: str) -> None:
    answer = shared_api.client.get(path)
    assert answer.status_code == 404
    assert len(answer.content) < 1000


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/octet-stream", ""])
def test_a_body_of_another_kind_is_415_with_the_header_to_send(shared_api: ApiServer, kind: str) -> None:
    answer = shared_api.client.post("/v1/experiments", content=b'{"name": "x"}', headers={"Content-Type": kind})
    body = _check(answer, 415, "unsupported_media_type")
    assert "`Content-Type: application/json`" in body["detail"] and (kind or "missing") in body["detail"]


def test_a_body_over_the_cap_is_413(settings: Settings) -> None:
    with ThreadServer(settings.model_copy(update={"max_json_bytes": 10_000})) as api:
        good = {"name": "x", "description": "y" * 9_000}
        assert api.client.post("/v1/experiments", json=good).status_code == 201
        _check(api.client.post("/v1/experiments", json={"name": "x" * 10_000}), 413, "body_too_large")


def test_a_body_over_the_cap_is_413_without_a_length_too(settings: Settings) -> None:
    def chunks() -> Any:
        for _ in range(100):
            yield b" " * 1000

    with ThreadServer(settings.model_copy(update={"max_json_bytes": 10_000})) as api:
        answer = api.client.post("/v1/experiments", content=chunks(), headers={"Content-Type": "application/json"})
        _check(answer, 413, "body_too_large")
        assert "10,000 bytes" in answer.json()["detail"]


def test_a_body_that_stops_in_the_middle_is_408(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.api.middleware.body_limits._IDLE_SECONDS", 0.2)
    for path, kind in (("/v1/experiments", "application/json"), ("/v1/datasets", "multipart/form-data; boundary=b")):
        with ThreadServer(settings) as api, socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {api.key}\r\n"
                f"Content-Type: {kind}\r\nContent-Length: 100\r\n\r\n".encode()
            )
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_database_that_goes_away_is_503_and_comes_back(api: ApiServer, settings: Settings) -> None:
    assert api.client.get("/v1/experiments").status_code == 200
    assert settings.database_url
    name = settings.database_url.rsplit("/", 1)[1].split("?")[0]
    admin = settings.database_url.replace(name, "postgres")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        answer = api.client.get("/v1/experiments")
        body = _check(answer, 503, "database_unavailable")
        assert int(answer.headers["retry-after"]) > 0
        assert name not in json.dumps(body)
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    assert api.client.get("/v1/experiments").status_code == 200


def test_a_mistake_of_ours_is_500_without_its_traceback(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("secret detail")

    with ThreadServer(settings) as server:
        server.application.add_api_route("/broken", fail)
        answer = server.client.get("/broken")
    body = _check(answer, 500, "internal")
    assert "secret detail" not in answer.text and "Traceback" not in answer.text
    assert body["request_id"] in caplog.text and "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 507, "disk_full"),
        (OSError(errno.EDQUOT, "Quota exceeded"), 507, "disk_full"),
        (OSError(errno.EROFS, "Read-only file system"), 503, "storage_unavailable"),
        (OSError(errno.EIO, "Input/output error"), 503, "storage_unavailable"),
        (OSError(errno.EMFILE, "Too many open files"), 503, "server_exhausted"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 503, "server_exhausted"),
        (psycopg.OperationalError("gone"), 503, "database_unavailable"),
        (psycopg.InterfaceError("closed"), 503, "database_unavailable"),
        (sqlalchemy.exc.TimeoutError("pool"), 503, "database_unavailable"),
        (sqlalchemy.exc.OperationalError("x", {}, psycopg.errors.AdminShutdown()), 503, "database_unavailable"),
        (sqlalchemy.exc.OperationalError("x", {}, psycopg.errors.DiskFull()), 507, "disk_full"),
        (sqlalchemy.exc.OperationalError("x", {}, psycopg.errors.QueryCanceled()), 503, "statement_timeout"),
        (psycopg.errors.QueryCanceled("canceling statement"), 503, "statement_timeout"),
        (
            sqlalchemy.exc.OperationalError("x", {}, psycopg.errors.DeadlockDetected()),
            503,
            "transaction_conflict",
        ),
    ],
)
def test_failures_of_what_we_stand_on_have_their_own_answer(error: Exception, status: int, code: str) -> None:
    answer = errors.as_api_error(error)
    assert answer is not None and (answer.status, answer.code) == (status, code)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "x"),
        ValueError(),
        sqlalchemy.exc.IntegrityError("x", {}, psycopg.errors.UniqueViolation()),
    ],
)
def test_unrelated_failures_are_not_reported_as_unavailable(error: Exception) -> None:
    assert errors.as_api_error(error) is None


def test_text_of_a_request_is_cleaned_before_it_is_returned() -> None:
    error = ApiError(422, "x", "a\x1b[31mb\ud800", [FieldError(field="f\n" * 500, code="c", message="m" * 5000)])
    body = json.loads(bytes(errors.problem_response({"type": "http"}, error).body))
    assert body["detail"] == "a�[31mb�"
    assert len(body["errors"][0]["field"]) <= 200
    assert len(body["errors"][0]["message"]) <= 500


def test_openapi_describes_every_error_as_a_problem_and_every_body_by_example(shared_api: ApiServer) -> None:
    document = shared_api.client.get("/openapi.json").json()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            for status, response in operation["responses"].items():
                if status >= "400":
                    form = "application/json" if path.startswith("/openai/") else "application/problem+json"
                    assert list(response["content"]) == [form], (method, path, status)
            assert ("401" in operation["responses"]) == (path != "/healthz")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                assert _has_example(document, content), (method, path)
            for status, response in operation["responses"].items():
                for kind, content in response.get("content", {}).items():
                    if "json" in kind and "ndjson" not in kind:
                        assert _has_example(document, content), (method, path, status)
    assert "HTTPValidationError" not in document["components"]["schemas"]


def _has_example(document: dict[str, Any], content: dict[str, Any]) -> bool:
    if "example" in content or "examples" in content:
        return True
    for schema in content["schema"].get("anyOf", [content["schema"]]):
        name = schema.get("$ref", "").removeprefix("#/components/schemas/")
        if "example" in document["components"]["schemas"].get(name, schema):
            return True
    return False
