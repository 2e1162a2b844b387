"""Everything below `/openai` answers errors in OpenAI's form, as its clients raise them."""

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from anneal.contracts.errors import FieldError
from app.api import errors
from app.api.errors import ApiError
from tests.openai.conftest import client_of
from tests.server import ApiServer


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's form and an id."""
    assert answer.headers["content-type"] == "application/json", answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    body = answer.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert {"message", "type", "param", "code"} <= error.keys() <= {"message", "type", "param", "code", "errors"}
    assert ("errors" in error or error["message"].endswith((".", "!"))) and error["code"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "kind"),
    [
        ("GET", "/openai", 404, "not_found", "invalid_request_error"),
        ("GET", "/openai/v1/nowhere", 404, "not_found", "invalid_request_error"),
        ("POST", "/openai/v1/embeddings", 404, "not_found", "invalid_request_error"),
        ("GET", "/openai/v1/models/run_1", 404, "model_not_found", "invalid_request_error"),
        ("DELETE", "/openai/v1/models/x", 405, "method_not_allowed", "invalid_request_error"),
        ("GET", "/openai/v1/models?limit=1", 400, "unknown_parameter", "invalid_request_error"),
        ("GET", "/openai/v1/models/%00", 400, "nul_in_text", "invalid_request_error"),
    ],
)
def test_error_of_a_call_has_the_form_of_openai(
    shared_api: ApiServer, method: str, path: str, status: int, code: str, kind: str
) -> None:
    answer = shared_api.client.request(method, path, headers={"Accept": "text/html"})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["type"]) == (status, code, kind)


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b'{"a": NaN}', "application/json", 400, "not_finite"),
        (b"x", "text/plain", 415, "unsupported_media_type"),
        (b"x" * 2**21, "application/json", 413, "body_too_large"),
    ],
)
def test_body_that_no_endpoint_reads_is_refused_in_the_form_of_openai(
    shared_api: ApiServer, content: bytes, kind: str, status: int, code: str
) -> None:
    for path in ("/openai/v1/nowhere", "/openai/v1/models"):
        answer = shared_api.client.post(path, content=content, headers={"Content-Type": kind})
        assert (answer.status_code, error_of(answer)["code"]) == (status, code)


def test_errors_of_other_hosts_and_origins_have_the_form_of_openai(shared_api: ApiServer) -> None:
    other_host = shared_api.client.get("/openai/v1/models", headers={"Host": "evil.example"})
    assert (other_host.status_code, error_of(other_host)["code"]) == (400, "host_not_allowed")
    other_origin = shared_api.client.post("/openai/v1/models", json={}, headers={"Origin": "https://evil.example"})
    assert (other_origin.status_code, error_of(other_origin)["code"]) == (403, "origin_not_allowed")


def test_client_raises_its_own_errors_for_wrong_keys_and_missing_scopes(shared_api: ApiServer) -> None:
    with client_of(shared_api, "sk-of-another-service") as client, pytest.raises(openai.AuthenticationError) as wrong:
        client.models.list()
    assert wrong.value.code == "invalid_api_key" and "anneal keys create" in wrong.value.message
    assert wrong.value.request_id is not None
    with shared_api.client_with(None) as untrusted:
        answer = untrusted.get("/openai/v1/models", headers={"Accept": "text/html"})
    assert (answer.status_code, error_of(answer)["code"]) == (401, "missing_key")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    with (
        client_of(shared_api, shared_api.key_with(["read"])) as reader,
        pytest.raises(openai.PermissionDeniedError) as no,
    ):
        reader.post("/models", cast_to=object)
    assert no.value.code == "scope_missing" and "anneal keys create --scope write" in no.value.message


def test_client_raises_not_found_for_an_unknown_model(shared_api: ApiServer) -> None:
    with client_of(shared_api) as client, pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("gpt-4o-mini")
    assert unknown.value.code == "model_not_found"
    assert "'gpt-4o-mini'" in unknown.value.message and "/openai/v1/models" in unknown.value.message


def test_body_of_an_error_without_a_key_is_not_read(shared_api: ApiServer) -> None:
    head = "POST /openai/v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 209715200\r\n\r\n"
    with socket.create_connection(("127.0.0.1", shared_api.port), timeout=20) as connection:
        connection.sendall(head.encode())
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 401") and b'{"error":{"message":' in answer


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        (b"/openai/v1/models?x=y", b"a: b\r\n" * 200, 431, "too_many_headers"),
        (b"/openai/v1/models", b"no colon\r\n", 400, "invalid_http"),
    ],
)
def test_request_that_is_not_parsed_is_refused_in_the_form_of_openai(
    shared_api: ApiServer, path: bytes, headers: bytes, status: int, code: str
) -> None:
    with socket.create_connection(("127.0.0.1", shared_api.port), timeout=20) as connection:
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
        answer = connection.recv(65536)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code


@pytest.mark.parametrize(
    ("status", "answered", "kind", "should_retry"),
    [
        (422, 400, "invalid_request_error", None),
        (409, 409, "invalid_request_error", "false"),
        (429, 429, "rate_limit_error", None),
        (503, 503, "server_error", None),
    ],
)
def test_status_type_and_retries_follow_the_clients_of_openai(
    status: int, answered: int, kind: str, should_retry: str | None
) -> None:
    error = ApiError(status, "some_code", "A sentence.", headers={"Retry-After": "5"})
    response = errors.problem_response({"type": "http", "path": "/openai/v1/files"}, error)
    assert response.status_code == answered
    assert response.headers.get("x-should-retry") == should_retry and response.headers["retry-after"] == "5"
    assert json.loads(bytes(response.body)) == {
        "error": {"message": "A sentence.", "type": kind, "param": None, "code": "some_code"}
    }


def test_error_that_asks_for_a_retry_keeps_its_header() -> None:
    error = ApiError(409, "some_code", "A sentence.", headers={"x-should-retry": "true"})
    response = errors.problem_response({"type": "http", "path": "/openai/v1/files"}, error)
    assert response.headers["x-should-retry"] == "true"


def test_first_error_of_several_names_the_parameter_and_all_are_listed() -> None:
    problems = [FieldError(field=name, code="missing", message="is required") for name in ("model", "training_file")]
    response = errors.problem_response({"type": "http", "path": "/openai/v1/x"}, errors.invalid(problems))
    error = json.loads(bytes(response.body))["error"]
    assert error["param"] == "model" and error["message"].startswith("`model`: is required.")
    assert [one["field"] for one in error["errors"]] == ["model", "training_file"]
    assert error["message"].endswith("\n- `model`: is required\n- `training_file`: is required")


def test_paths_that_only_begin_like_it_keep_the_native_form(shared_api: ApiServer) -> None:
    for path in ("/openair", "/v1/openai", "/OPENAI/v1/models"):
        answer = shared_api.client.get(path)
        assert answer.headers["content-type"] == "application/problem+json", path
