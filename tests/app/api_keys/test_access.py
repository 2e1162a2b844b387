"""Promises about who gets where, for every route that is mounted: walked, so that a new one cannot be forgotten."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from fastapi import APIRouter, FastAPI
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from app.api.authorization import FOR_ITSELF, is_public_call
from app.api_keys.failure_limit import FailureLimit
from app.api_keys.service import create_key_sync, list_keys_sync, revoke_key_sync
from tests.app.routes import SAFE, UNSAFE, calls, paths
from tests.server import ApiServer, ThreadServer

_UPLOAD = (
    "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 209715200\r\n"
    "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
)


def _calls(api: ApiServer) -> list[tuple[str, str]]:
    assert isinstance(api, ThreadServer)
    everything = set(calls(api.application.routes))
    documented = api.application.openapi()["paths"].values()
    assert len(everything) >= sum(len(item) for item in documented), "and those that are not documented"
    return sorted(call for call in everything if not is_public_call(*call))


def test_public_are_the_health_check_the_pages_and_signing_in_and_nothing_else(shared_api: ApiServer) -> None:
    assert isinstance(shared_api, ThreadServer)
    run = "run_" + "0" * 26
    pages = [
        "/", f"/assets/{run}/{run}", "/compare", "/datasets", f"/datasets/{run}", "/experiments", f"/experiments/{run}",
        "/favicon.ico", "/login", "/new", f"/runs/{run}", "/try", "/webhooks", f"/webhooks/{run}", "/workers",
    ]  # fmt: skip
    reading = [(method, path) for path in pages for method in ("GET", "HEAD")]
    public = {call for call in calls(shared_api.application.routes) if is_public_call(*call)}
    assert public == {("GET", "/healthz"), ("POST", "/v1/session"), *reading}


def test_the_walk_sees_included_routers_mounts_and_what_is_mounted_in_them(tmp_path: Path) -> None:
    app = FastAPI(openapi_url=None)
    inner, outer = APIRouter(), APIRouter()
    inner.add_api_route("/{name}", lambda name: name, methods=["PUT"])
    outer.include_router(inner, prefix="/inner")
    app.include_router(outer, prefix="/outer")
    app.router.routes.append(Mount("/pages", routes=[Route("/one", lambda _: None, methods=["POST"])]))
    app.mount("/files", StaticFiles(directory=tmp_path))
    run = "run_" + "0" * 26
    assert set(calls(app.routes)) == {
        ("PUT", f"/outer/inner/{run}"),
        ("POST", "/pages/one"),
        ("GET", "/files/index.html"),
    }


def test_without_a_key_every_call_answers_401_while_its_body_is_still_to_come(shared_api: ApiServer) -> None:
    """200 MB are announced and not one byte of them is sent: whoever read the body would wait for it."""

    def ask(call: tuple[str, str]) -> bytes:
        with socket.create_connection(("127.0.0.1", shared_api.port), timeout=20) as connection:
            connection.sendall(_UPLOAD.format(method=call[0], path=call[1]).encode())
            return connection.recv(4096)

    calls = [*_calls(shared_api), ("POST", "/healthz"), ("POST", "/nowhere"), ("DELETE", "/static/../v1/runs")]
    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(calls, pool.map(ask, calls), strict=True))
    assert {call: answer[:60] for call, answer in answers.items() if not answer.startswith(b"HTTP/1.1 401")} == {}
    assert not any(path.is_file() for path in shared_api.settings.storage_root.rglob("*"))


def test_a_key_that_only_reads_changes_nothing_anywhere(shared_api: ApiServer) -> None:
    """Every unsafe method on every path, those that no route takes among them."""
    assert isinstance(shared_api, ThreadServer)
    with shared_api.client_with(shared_api.key_with(["read"])) as reader:
        answers = {
            (method, path): reader.request(method, path, json={})
            for path in paths(shared_api.application.routes)
            for method in UNSAFE
        }
    assert len(answers) > 100
    # What signs a browser in or out affects nothing but the caller.
    allowed = {*FOR_ITSELF, ("POST", "/v1/session")}
    refused = {call: answer for call, answer in answers.items() if call not in allowed}
    wrong = {call: answer.status_code for call, answer in refused.items() if answer.status_code != 403}
    assert wrong == {}
    codes = {(body := answer.json()).get("error", body)["code"] for answer in refused.values()}
    assert codes == {"scope_missing"}


@pytest.mark.parametrize("ended", ["expired", "revoked"])
def test_an_ended_key_gets_in_nowhere(shared_api: ApiServer, ended: str) -> None:
    assert isinstance(shared_api, ThreadServer)
    key = create_key_sync(shared_api.settings, ended, ["admin"], timedelta(hours=1))
    key_id = list_keys_sync(shared_api.settings)[0].id
    if ended == "revoked":
        assert revoke_key_sync(shared_api.settings, key_id)
    else:
        with psycopg.connect(shared_api.settings.database_url or "", autocommit=True) as connection:
            connection.execute("UPDATE api_keys SET expires_at = now() WHERE id = %s", [key_id])
    statuses = {}
    with shared_api.client_with(key) as client:
        for method, path in _calls(shared_api):
            shared_api.application.state.auth.failures = FailureLimit()
            statuses[method, path] = client.request(method, path, json=None if method in SAFE else {}).status_code
    assert {call: status for call, status in statuses.items() if status != 401} == {}
