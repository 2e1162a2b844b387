"""Promises about keys: who gets in, when, and what it costs those who do not."""

import asyncio
import hashlib
import re
import socket
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import psycopg
import pytest

from anneal.contracts.schemas.administration.api_keys import KeyView
from app.api.authorization import is_public_call
from app.api_keys import verifier
from app.api_keys.failure_limit import FAILURE_INTERVAL_SECONDS, FailureLimit
from app.api_keys.service import create_key_sync, list_keys_sync, revoke_key_sync
from app.api_keys.verifier import CACHE_SECONDS, KeyVerifier
from app.config import Settings
from app.infra.db import async_engine, session_maker
from app.infra.ids import new_id
from app.main import create_app
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")


def _execute(settings: Settings, statement: str, *values: object) -> None:
    assert settings.database_url
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute(statement, values)  # type: ignore[arg-type]


def _paths(settings: Settings) -> list[str]:
    paths = create_app(settings).openapi()["paths"]
    return [re.sub(r"\{[^}]+\}", "run_" + "0" * 26, path) for path in paths] + ["/docs", "/openapi.json", "/nowhere"]


def _only_key(settings: Settings, name: str = "test") -> KeyView:
    return next(key for key in list_keys_sync(settings) if key.name == name)


def test_without_a_key_every_route_and_method_answers_401(api: ApiServer, settings: Settings) -> None:
    public = [(method, path) for path in _paths(settings) for method in METHODS if not is_public_call(method, path)]
    assert len(public) > 100
    with api.client_with(None) as untrusted:
        answers = {(method, path): untrusted.request(method, path) for method, path in public}
    assert {key: answer.status_code for key, answer in answers.items() if answer.status_code != 401} == {}
    example = (
        answers["POST", "/v1/runs/validate"] if ("POST", "/v1/runs/validate") in answers else answers["GET", "/docs"]
    )
    assert example.headers["www-authenticate"].startswith("Bearer")
    assert example.headers["content-type"] == "application/problem+json"
    assert "anneal keys create" in example.json()["detail"]


def test_only_reading_healthz_is_public(shared_api: ApiServer) -> None:
    with shared_api.client_with(None) as untrusted:
        assert untrusted.post("/healthz", json={}).status_code == 401
        assert untrusted.request("GET", "/healthz", content=b"x" * 1000).status_code == 413


@pytest.mark.parametrize(
    "path", ["//healthz", "/healthz/", "/healthz/../v1/experiments", "/HEALTHZ", "/healthz%2f..%2fv1", "/healthz;/v1"]
)
def test_nothing_that_looks_like_a_public_path_is_public(shared_api: ApiServer, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert _raw(shared_api, request.encode()).startswith(b"HTTP/1.1 401")


def test_a_websocket_is_refused(shared_api: ApiServer) -> None:
    answer = _raw(
        shared_api,
        b"GET /v1/experiments HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    )
    assert not answer.startswith(b"HTTP/1.1 101")


def test_a_body_without_a_key_is_refused_before_a_byte_of_it_is_read(api: ApiServer, settings: Settings) -> None:
    """The answer comes while the body has not even been sent, and nothing is stored."""
    head = (
        b"POST /v1/datasets HTTP/1.1\r\nHost: localhost\r\nContent-Length: 209715200\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(head)
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
    assert not settings.storage_root.exists() or not list(settings.storage_root.rglob("*"))


def test_a_key_has_256_random_bits_and_only_its_hash_is_stored(settings: Settings) -> None:
    key = create_key_sync(settings, "one", ["read"])
    other = create_key_sync(settings, "two", ["read"])
    assert re.fullmatch(r"anneal_[A-Za-z0-9_-]{43}", key) and key != other
    assert settings.database_url
    with psycopg.connect(settings.database_url) as connection:
        row = connection.execute("SELECT k::text, digest FROM api_keys k WHERE name = 'one'").fetchone()
    assert row is not None
    assert key not in row[0]
    assert row[1] == hashlib.sha256(key.encode()).hexdigest()
    listed = _only_key(settings, "one")
    assert key.startswith(listed.prefix) and len(listed.prefix) < 16


def test_unknown_scopes_are_refused(settings: Settings) -> None:
    for scopes in ([], ["root"], ["read", "rwite"]):
        with pytest.raises(ValueError, match="read, write, admin"):
            create_key_sync(settings, "x", scopes)


@pytest.mark.parametrize(
    ("scopes", "may_read", "may_write"),
    [(["read"], True, False), (["write"], False, True), (["read", "write"], True, True), (["admin"], True, True)],
)
def test_reading_needs_read_and_changing_needs_write(
    shared_api: ApiServer, scopes: list[str], may_read: bool, may_write: bool
) -> None:
    with shared_api.client_with(shared_api.key_with(scopes)) as client:
        read = client.get("/v1/experiments")
        write = client.post("/v1/experiments", json={"name": "x"})
    assert read.status_code == (200 if may_read else 403)
    assert write.status_code == (201 if may_write else 403)
    for answer in (read, write):
        if answer.status_code == 403:
            assert answer.json()["code"] == "scope_missing"


def test_an_expired_key_is_refused(api: ApiServer, settings: Settings) -> None:
    key = create_key_sync(settings, "short", ["admin"], expires_in=timedelta(hours=1))
    with api.client_with(key) as client:
        assert client.get("/v1/experiments").status_code == 200
    gone = create_key_sync(settings, "gone", ["admin"], expires_in=timedelta(seconds=-1))
    with api.client_with(gone) as client:
        answer = client.get("/v1/experiments")
    assert (answer.status_code, answer.json()["code"]) == (401, "invalid_key")


def test_a_revoked_key_is_refused(settings: Settings) -> None:
    with ThreadServer(settings) as api:
        assert revoke_key_sync(settings, _only_key(settings).id)
        # The server has not seen this key yet: what is revoked counts at once for those that come anew.
        assert api.client.get("/v1/experiments").status_code == 401


def test_a_verdict_is_remembered_for_less_than_half_a_minute() -> None:
    assert CACHE_SECONDS <= 15


def test_revoking_what_is_not_there_says_so(settings: Settings) -> None:
    assert revoke_key_sync(settings, new_id("key")) is False


async def test_a_remembered_key_ends_with_its_verdict(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    key = create_key_sync(settings, "x", ["read"])
    key_id = _only_key(settings, "x").id
    engine = async_engine(settings.database_url or "")
    auth = KeyVerifier(session_maker(engine))
    try:
        caller = await auth.verify_key(key)
        assert caller is not None and caller.key_id == key_id
        assert auth.cached_caller(key) == caller
        assert await auth.still_valid(key_id)
        revoke_key_sync(settings, key_id)
        later = time.monotonic() + CACHE_SECONDS + 0.1
        # The module's own clock alone: the event loop has to go on by the process's.
        monkeypatch.setattr(verifier, "time", SimpleNamespace(monotonic=lambda: later))
        assert auth.cached_caller(key) is None
        assert await auth.verify_key(key) is None
        assert not await auth.still_valid(key_id)
    finally:
        await engine.dispose()


async def test_a_key_that_expires_is_not_remembered_beyond_that(settings: Settings) -> None:
    key = create_key_sync(settings, "x", ["read"], expires_in=timedelta(seconds=0.6))
    engine = async_engine(settings.database_url or "")
    auth = KeyVerifier(session_maker(engine))
    try:
        if await auth.verify_key(key):
            deadline = time.monotonic() + 5
            while auth.cached_caller(key) is not None:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        assert await auth.verify_key(key) is None
    finally:
        await engine.dispose()


def test_last_used_is_kept_at_most_once_a_minute(api: ApiServer, settings: Settings) -> None:
    def use() -> None:
        with ThreadServer(settings) as another, another.client_with(key) as client:  # a server without memory
            assert client.get("/v1/experiments").status_code == 200

    key = create_key_sync(settings, "used", ["read"])
    assert _only_key(settings, "used").last_used_at is None
    use()
    first = _only_key(settings, "used").last_used_at
    assert first is not None
    use()
    assert _only_key(settings, "used").last_used_at == first
    _execute(settings, "UPDATE api_keys SET last_used_at = now() - interval '2 minutes' WHERE name = 'used'")
    use()
    later = _only_key(settings, "used").last_used_at
    assert later is not None and later >= first


def test_an_address_that_tries_many_wrong_keys_has_to_wait(api: ApiServer) -> None:
    assert api.client.get("/v1/experiments").status_code == 200
    with api.client_with("anneal_" + "x" * 43) as untrusted:
        answers = [untrusted.get("/v1/experiments") for _ in range(40)]
    assert answers[0].status_code == 401
    assert answers[-1].status_code == 429
    assert int(answers[-1].headers["retry-after"]) > 0
    assert api.client.get("/v1/experiments").status_code == 200, "a known key is not locked out by its neighbours"


def test_a_right_key_that_was_never_used_gets_in_though_its_neighbours_try_wrong_ones(api: ApiServer) -> None:
    with api.client_with("anneal_" + "x" * 43) as untrusted:
        answers = [untrusted.get("/v1/experiments") for _ in range(30)]
    assert answers[-1].status_code == 429
    with api.client_with(api.key_with(["read"])) as friend:
        eventually(lambda: friend.get("/v1/experiments").status_code == 200, timeout=5)


def test_wrong_keys_of_an_address_that_has_to_wait_cost_no_query_each(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[str] = []
    verify = KeyVerifier.verify_key

    async def counted(self: KeyVerifier, key: str) -> Any:
        verified.append(key)
        return await verify(self, key)

    monkeypatch.setattr(KeyVerifier, "verify_key", counted)
    began = time.monotonic()
    for number in range(60):
        with api.client_with(f"anneal_{number:043}") as untrusted:
            untrusted.get("/v1/experiments")
    assert 20 <= len(verified) <= 21 + (time.monotonic() - began) / FAILURE_INTERVAL_SECONDS


def test_the_list_of_failing_addresses_is_bounded() -> None:
    limit = FailureLimit()
    for number in range(20_000):
        limit.count_attempt(str(number))
    assert len(limit._spent) == 10_000


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic YTpi", "Bearer \xe9\xe9", "bearer anneal_short"])
def test_every_other_authorization_is_401(shared_api: ApiServer, value: str) -> None:
    raw = b"GET /v1/experiments HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: %s\r\n\r\n"
    answer = _raw(shared_api, raw % value.encode("latin-1"))
    assert answer.startswith(b"HTTP/1.1 401")
    assert (b"missing_key" in answer) is (value in ("", "Bearer", "Bearer "))


@pytest.mark.parametrize("lines", [["Basic {}"], ["Token {}"], ["{}"], ["Bearer {}", "Bearer {}"]], ids=str)
def test_a_key_that_was_just_verified_needs_its_scheme_and_only_one_header_too(
    shared_api: ApiServer, lines: list[str]
) -> None:
    assert shared_api.client.get("/v1/experiments").status_code == 200
    sent = "".join(f"Authorization: {line.format(shared_api.key)}\r\n" for line in lines)
    raw = f"GET /v1/experiments HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{sent}\r\n"
    assert _raw(shared_api, raw.encode()).startswith(b"HTTP/1.1 401")


def test_without_a_database_a_key_gets_503_and_retry_after(settings: Settings) -> None:
    api = ThreadServer(settings)
    away = settings.model_copy(update={"database_url": "postgresql://x:y@127.0.0.1:1/z"})
    api.settings = away
    with api:
        answer = api.client.get("/v1/experiments")
        assert api.client.get("/healthz").status_code == 200
    assert answer.status_code == 503
    assert answer.json()["code"] == "database_unavailable"
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("127.0.0.1:9", 200), ("[::1]:80", 200), ("api.internal", 200), ("API.internal:1", 200),
        ("evil.example", 400), ("127.0.0.1.evil.example", 400), ("", 400), ("169.254.1.1", 400),
    ],
)  # fmt: skip
def test_only_known_hosts_are_answered(settings: Settings, host: str, status: int) -> None:
    with ThreadServer(settings.model_copy(update={"allowed_hosts": "api.internal, other"})) as api:
        assert api.client.get("/v1/experiments", headers={"Host": host}).status_code == status


def test_a_page_of_another_origin_may_not_write(shared_api: ApiServer) -> None:
    def post(origin: str) -> httpx.Response:
        return shared_api.client.post("/v1/experiments", json={"name": "x"}, headers={"Origin": origin})

    assert post(shared_api.url).status_code == 201
    assert post(shared_api.url.replace("http", "https")).status_code == 201, "a proxy may end TLS before us"
    for origin in (
        "http://evil.example",
        "null",
        shared_api.url + ".evil.example",
        "http://127.0.0.1:1",
        "http://localhost",
    ):
        answer = post(origin)
        assert (answer.status_code, answer.json()["code"]) == (403, "origin_not_allowed")
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_no_page_is_allowed_to_read(shared_api: ApiServer) -> None:
    answer = shared_api.client.options(
        "/v1/experiments",
        headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
    )
    assert not any(name.startswith("access-control") for name in answer.headers)


def _raw(api: ApiServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(4096)
