"""Promises about browsers: who signs in, what a session, a link and a ticket open, and what no other site can do."""

import json
import logging
import socket
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psycopg
import pytest
from sqlalchemy import Engine
from starlette.datastructures import Headers

from app.api_keys import verifier
from app.api_keys.cookies import session_of
from app.api_keys.failure_limit import FailureLimit
from app.api_keys.service import list_keys_sync, revoke_key_sync
from app.api_keys.verifier import CACHE_SECONDS
from app.config import Settings
from app.infra.db import sync_engine
from app.infra.ids import new_id
from app.runs.events import stream
from tests.factories import make_dataset, make_run
from tests.server import ApiServer, ThreadServer

OWN_PAGE = "sec-fetch-site"
DASHBOARD = "https://dashboards.example.com"


@pytest.fixture(autouse=True)
def no_failures(shared_api: ApiServer) -> None:
    """Start each test with no failures counted; all come from the same address."""
    assert isinstance(shared_api, ThreadServer)
    shared_api.application.state.auth.failures = FailureLimit()


@pytest.fixture
def browser(shared_api: ApiServer) -> Iterator[httpx.Client]:
    """A browser on a page of this service, signed in with a key of its own."""
    with signed_in(shared_api, shared_api.key_with(["read", "write"])) as client:
        yield client


@contextmanager
def signed_in(api: ApiServer, key: str) -> Iterator[httpx.Client]:
    with api.client_with(None) as client:
        client.headers.update({"Origin": api.url, OWN_PAGE: "same-origin"})
        answer = client.post("/v1/session", json={"key": key})
        assert answer.status_code == 201, answer.text
        yield client


def code(answer: httpx.Response) -> str:
    error_code: str = answer.json()["code"]
    return error_code


def execute(api: ApiServer, statement: str) -> None:
    with psycopg.connect(api.settings.database_url or "", autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[arg-type]


class TestSession:
    def test_session_has_scopes_of_its_key_and_cookie_is_http_only(self, shared_api: ApiServer) -> None:
        with signed_in(shared_api, shared_api.key_with(["read"])) as browser:
            answer = browser.get("/v1/session")
            (cookie,) = browser.cookies.jar
            refused = browser.post("/v1/experiments", json={"name": "x"})
            with shared_api.client_with(None) as again:
                login = again.post("/v1/session", json={"key": shared_api.key_with(["read"])})
        assert answer.json()["scopes"] == ["read"] and answer.json()["credential"] == "session"
        assert cookie.name == f"anneal_session_{shared_api.port}" and cookie.path == "/" and not cookie.secure
        sent = login.headers["set-cookie"]
        assert "HttpOnly" in sent and "SameSite=strict" in sent and "Max-Age=2592000" in sent
        assert (refused.status_code, code(refused)) == (403, "scope_missing")

    def test_session_cookie_is_secure_over_https(self, shared_api: ApiServer) -> None:
        """A proxy that terminates TLS: this server sees plain HTTP, the page has the origin of the proxy."""
        with shared_api.client_with(None) as browser:
            origin = shared_api.url.replace("http:", "https:")
            login = browser.post("/v1/session", json={"key": shared_api.key_with(["read"])}, headers={"Origin": origin})
            name, _, value = login.headers["set-cookie"].partition(";")[0].partition("=")
            session = browser.get("/v1/session", headers={"Cookie": f"{name}={value}"})
        assert name == f"__Host-anneal_session_{shared_api.port}" and "Secure" in login.headers["set-cookie"]
        assert session.status_code == 200

    def test_session_changes_things_from_its_own_page_only(self, shared_api: ApiServer, browser: httpx.Client) -> None:
        def change(**headers: str | None) -> httpx.Response:
            sent = {name: value for name, value in {**browser.headers, **headers}.items() if value is not None}
            with httpx.Client(base_url=shared_api.url, headers=sent, cookies=browser.cookies) as client:
                return client.post("/v1/experiments", json={"name": new_id("exp")})

        assert change().status_code == 201
        other_port = f"http://127.0.0.1:{shared_api.port + 1}"
        assert {
            name: (answer.status_code, code(answer))
            for name, answer in {
                "other site": change(origin="https://evil.example", **{OWN_PAGE: "cross-site"}),
                "other port": change(origin=other_port, **{OWN_PAGE: "same-site"}),
                "no origin": change(origin=None),
                "null": change(origin="null"),
                "another site that claims ours": change(**{OWN_PAGE: "cross-site"}),
            }.items()
        } == {
            "other site": (403, "origin_not_allowed"),
            "other port": (403, "origin_not_allowed"),
            "no origin": (403, "origin_required"),
            "null": (403, "origin_not_allowed"),
            "another site that claims ours": (401, "missing_key"),
        }

    @pytest.mark.parametrize("site", ["cross-site", "same-site"])
    def test_session_is_not_usable_by_pages_of_other_sites(
        self, shared_api: ApiServer, browser: httpx.Client, site: str
    ) -> None:
        assert browser.get("/v1/runs", headers={OWN_PAGE: site}).status_code == 401
        assert browser.get("/v1/runs", headers={OWN_PAGE: "none"}).status_code == 200, "an address that was typed in"

    def test_session_ends_at_sign_out(self, browser: httpx.Client) -> None:
        cookies = dict(browser.cookies)
        assert browser.get("/v1/runs").status_code == 200
        assert browser.delete("/v1/session").status_code == 204
        assert not list(browser.cookies.jar)
        ended = browser.get("/v1/runs", cookies=cookies)
        assert (ended.status_code, code(ended)) == (401, "session_ended")

    @pytest.mark.parametrize("end", ["revoked", "expired", "deleted"])
    def test_session_ends_with_its_key_and_at_its_expiry(
        self, shared_api: ApiServer, end: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert isinstance(shared_api, ThreadServer) and CACHE_SECONDS <= 10
        with signed_in(shared_api, shared_api.key_with(["read"])) as browser:
            assert browser.get("/v1/runs").status_code == 200
            key_id = browser.get("/v1/session").json()["key_id"]
            if end == "revoked":
                assert revoke_key_sync(shared_api.settings, key_id)
            elif end == "deleted":
                execute(shared_api, f"DELETE FROM api_keys WHERE id = '{key_id}'")
            else:
                execute(shared_api, f"UPDATE tokens SET expires_at = now() WHERE key_id = '{key_id}'")
            # What is remembered for ten seconds is forgotten here at once.
            shared_api.application.state.auth._callers.clear()
            ended = browser.get("/v1/runs")
        assert (ended.status_code, code(ended)) == (401, "session_ended")

    def test_a_header_wins_over_a_cookie(self, shared_api: ApiServer, browser: httpx.Client) -> None:
        wrong = browser.get("/v1/session", headers={"Authorization": "Bearer anneal_" + "x" * 43})
        assert (wrong.status_code, code(wrong)) == (401, "invalid_key")
        right = browser.get("/v1/session", headers={"Authorization": f"Bearer {shared_api.key}"})
        assert right.json()["credential"] == "key" and right.json()["expires_at"] is None

    @pytest.mark.parametrize(
        "cookie",
        [
            "anneal_session_1=anneal-session_" + "x" * 43, "anneal_session=", "x" * 20_000, "={token}", '{name}="',
            "{name}={key}", "{name}={link}", "{name}={token}x", "x{name}={token}", "{other}={token}",
        ],
    )  # fmt: skip
    def test_cookie_with_another_value_is_no_session(
        self, shared_api: ApiServer, browser: httpx.Client, cookie: str
    ) -> None:
        ((name, token),) = browser.cookies.items()
        link = browser.post("/v1/session/links").json()["url"].partition("#")[2]
        other = name.replace(str(shared_api.port), "1")
        text = cookie.replace("{name}", name).replace("{token}", token).replace("{key}", shared_api.key)
        text = text.replace("{link}", link).replace("{other}", other)
        with shared_api.client_with(None) as untrusted:
            assert untrusted.get("/v1/runs", headers={"Cookie": text}).status_code == 401

    def test_session_is_found_among_thousands_of_cookies_that_take_no_memory(
        self, shared_api: ApiServer, browser: httpx.Client
    ) -> None:
        ((name, token),) = browser.cookies.items()
        others = "".join(f"{number:x}=;" for number in range(3000))
        with shared_api.client_with(None) as client:
            for text in (f"{others} {name}={token}", f"{name}={token};{others}", f'a;;=; {name} = "{token}" ;b'):
                assert client.get("/v1/runs", headers={"Cookie": text}).status_code == 200, text[:40]
            fields = [("Cookie", "theme=dark"), ("Cookie", f"{name}={token}")]
            assert client.get("/v1/runs", headers=fields).status_code == 200, "a field for each cookie"
        headers = Headers({"cookie": others})
        tracemalloc.start()
        assert session_of(headers) is None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * 1024, "each takes at least 100 bytes once it is parsed"

    def test_session_needs_a_valid_key_and_a_small_body(self, shared_api: ApiServer) -> None:
        with shared_api.client_with(None) as browser:
            wrong = browser.post("/v1/session", json={"key": "anneal_" + "x" * 43})
            both = browser.post("/v1/session", json={"key": shared_api.key, "link": "x"})
            large = browser.post("/v1/session", json={"key": "x" * 5000})
            foreign = browser.post("/v1/session", json={"key": shared_api.key}, headers={"Origin": DASHBOARD})
        assert [answer.status_code for answer in (wrong, both, large, foreign)] == [401, 422, 413, 403]
        assert "anneal keys create" in wrong.json()["detail"]

    def test_session_request_with_large_body_is_refused_unread(self, shared_api: ApiServer) -> None:
        """The length is announced and no byte of the body is sent."""
        head = "POST /v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4097\r\n\r\n"
        with socket.create_connection(("127.0.0.1", shared_api.port), timeout=10) as connection:
            connection.sendall(head.encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 413")

    def test_session_stream_ends_when_its_key_is_revoked(
        self, shared_api: ApiServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verifier, "CACHE_SECONDS", 0.1)
        monkeypatch.setattr(stream, "RECHECK_SECONDS", 0.2)
        with signed_in(shared_api, shared_api.key_with(["read"])) as browser:
            key_id = browser.get("/v1/session").json()["key_id"]
            with browser.stream("GET", "/v1/events") as answer:
                assert answer.status_code == 200
                assert revoke_key_sync(shared_api.settings, key_id)
                answer.read()  # until the server ends the stream

    def test_session_of_a_read_key_can_sign_out_and_create_links_and_tickets(self, shared_api: ApiServer) -> None:
        with signed_in(shared_api, shared_api.key_with(["read"])) as browser:
            assert browser.post("/v1/session/links").status_code == 201
            assert browser.post("/v1/stream-tickets", json={}).status_code == 201
            assert browser.delete("/v1/session").status_code == 204

    def test_a_link_and_a_ticket_are_no_keys_and_no_tickets(self, shared_api: ApiServer, browser: httpx.Client) -> None:
        link = browser.post("/v1/session/links").json()["url"].partition("#")[2]
        ticket = browser.post("/v1/stream-tickets").json()["ticket"]
        (session,) = browser.cookies.values()
        with shared_api.client_with(None) as page:
            for token in (link, ticket, session):
                assert code(page.post("/v1/session", json={"key": token})) == "invalid_key"
                assert code(page.get("/v1/runs", headers={"Authorization": f"Bearer {token}"})) == "invalid_key"
            for token in (link, session, shared_api.key):
                refused = page.get("/v1/events", params={"ticket": token})
                assert code(refused) == "invalid_ticket" and "/v1/stream-tickets" in refused.json()["detail"]

    def test_failures_of_all_kinds_share_one_limit_and_a_valid_key_still_passes(self, shared_api: ApiServer) -> None:
        with shared_api.client_with(None) as guesser:
            name = f"anneal_session_{shared_api.port}"
            guesses = [
                lambda: guesser.post("/v1/session", json={"key": "anneal_" + "x" * 43}),
                lambda: guesser.post("/v1/session", json={"link": "anneal-link_" + "x" * 43}),
                lambda: guesser.get("/v1/runs", headers={"Cookie": f"{name}=anneal-session_" + "x" * 43}),
                lambda: guesser.get("/v1/events", params={"ticket": "anneal-ticket_" + "x" * 43}),
                lambda: guesser.get("/v1/runs", headers={"Authorization": "Bearer anneal_" + "x" * 43}),
            ]
            statuses = [guess().status_code for _ in range(5) for guess in guesses]
            assert statuses[:20] == [401] * 20 and set(statuses[21:]) == {429}
            assert guesser.post("/v1/session", json={"key": shared_api.key}).status_code == 201


class TestLink:
    def test_signs_in_once_even_if_twenty_try_at_once(self, shared_api: ApiServer) -> None:
        answer = shared_api.client.post("/v1/session/links")
        page, _, token = answer.json()["url"].partition("#")
        assert page == f"{shared_api.url}/login" and answer.headers["cache-control"] == "no-store"

        def use(_: int) -> int:
            with shared_api.client_with(None) as browser:
                return browser.post("/v1/session", json={"link": token}).status_code

        with ThreadPoolExecutor(20) as pool:
            statuses = sorted(pool.map(use, range(20)))
        assert statuses == [201] + [401] * 19

    @pytest.mark.parametrize("end", ["expired", "revoked", "a session"])
    def test_link_of_revoked_key_or_after_expiry_opens_no_session(self, shared_api: ApiServer, end: str) -> None:
        with shared_api.client_with(shared_api.key_with(["read"])) as holder:
            token = holder.post("/v1/session/links").json()["url"].partition("#")[2]
            key_id = holder.get("/v1/session").json()["key_id"]
        if end == "revoked":
            assert revoke_key_sync(shared_api.settings, key_id)
        elif end == "expired":
            execute(shared_api, f"UPDATE tokens SET expires_at = now() WHERE key_id = '{key_id}'")
        else:
            token = token.replace("link", "session")
        with shared_api.client_with(None) as browser:
            answer = browser.post("/v1/session", json={"link": token})
        assert (answer.status_code, code(answer)) == (401, "invalid_link") and "anneal open" in answer.json()["detail"]

    def test_link_and_session_are_audited_without_their_tokens(
        self, shared_api: ApiServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        link = shared_api.client.post("/v1/session/links").json()["url"].partition("#")[2]
        with shared_api.client_with(None) as browser:
            login = browser.post("/v1/session", json={"link": link})
            token = browser.cookies[f"anneal_session_{shared_api.port}"]
            ticket = shared_api.client.post("/v1/stream-tickets").json()["ticket"]
            assert browser.get("/v1/events", params={"ticket": ticket, "follow": False}).status_code == 200
            assert browser.get("/v1/events", params={"ticket": ticket, "typo": 1}).status_code == 422
        entries = shared_api.client.get("/v1/audit", params={"limit": 10}).json()["data"]
        routes = {(entry["method"], entry["route"], entry["status"]) for entry in entries}
        assert {("POST", "/v1/session/links", 201), ("POST", "/v1/session", 201)} <= routes
        assert login.json()["key_id"] in {entry["key_id"] for entry in entries}
        # The HTTP client of this test logs what it sends.
        ours = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
        seen = "\n".join(ours) + json.dumps(entries)
        assert [name for name in (link, token, ticket) if name in seen] == []


class TestTicket:
    @pytest.fixture
    def engine(self, shared_api: ApiServer) -> Iterator[Engine]:
        engine = sync_engine(shared_api.settings.database_url or "", pool_size=0)
        yield engine
        engine.dispose()

    @pytest.fixture
    def run(self, shared_api: ApiServer, engine: Engine) -> str:
        run: str = make_run(shared_api.client, make_dataset(engine))["id"]
        return run

    def test_opens_streams_and_nothing_else(self, shared_api: ApiServer, run: str) -> None:
        ticket = {"ticket": shared_api.client.post("/v1/stream-tickets").json()["ticket"]}
        with shared_api.client_with(None) as page:
            events = page.get(f"/v1/runs/{run}/events", params={**ticket, "follow": False})
            again = page.get("/v1/events", params={**ticket, "follow": False, "after": 0})
            others = [
                page.get(path, params=ticket).status_code
                for path in ("/v1/runs", f"/v1/runs/{run}", f"/v1/runs/{run}/logs", f"/v1/runs/{run}/metrics", "/docs")
            ]
            posted = page.post(f"/v1/runs/{run}/stop", params=ticket, json={}).status_code
            as_header = page.get("/v1/events", headers={"Authorization": f"Bearer {ticket['ticket']}"}).status_code
            doubled = page.get("/v1/events", params=[("ticket", ticket["ticket"])] * 2).status_code
        assert events.status_code == again.status_code == 200 and "event: status" in events.text
        assert [*others, posted, as_header, doubled] == [401] * 8

    def test_ticket_of_a_run_opens_only_that_run(self, shared_api: ApiServer, engine: Engine, run: str) -> None:
        other = make_run(shared_api.client, make_dataset(engine))["id"]
        ticket = shared_api.client.post("/v1/stream-tickets", json={"run_id": run}).json()
        assert ticket["run_id"] == run
        with shared_api.client_with(None) as page:
            parameters = {"ticket": ticket["ticket"], "follow": False}
            answers = [page.get(f"/v1/runs/{one}/events", params=parameters) for one in (run, other)]
            answers.append(page.get("/v1/events", params=parameters))
        assert [answer.status_code for answer in answers] == [200, 403, 403]
        assert code(answers[1]) == "ticket_of_other_run"
        unknown = shared_api.client.post("/v1/stream-tickets", json={"run_id": new_id("run")})
        assert (unknown.status_code, code(unknown)) == (404, "run_not_found")

    @pytest.mark.parametrize("end", ["expired", "revoked"])
    def test_ticket_ends_with_its_key_and_at_its_expiry(self, shared_api: ApiServer, end: str) -> None:
        assert isinstance(shared_api, ThreadServer)
        with shared_api.client_with(shared_api.key_with(["read"])) as holder:
            ticket = holder.post("/v1/stream-tickets").json()["ticket"]
            key_id = holder.get("/v1/session").json()["key_id"]
        if end == "revoked":
            assert revoke_key_sync(shared_api.settings, key_id)
        else:
            execute(shared_api, f"UPDATE tokens SET expires_at = now() WHERE key_id = '{key_id}'")
        with shared_api.client_with(None) as page:
            answer = page.get("/v1/events", params={"ticket": ticket, "follow": False})
        assert (answer.status_code, code(answer)) == (401, "invalid_ticket")

    def test_expired_tickets_are_deleted(self, shared_api: ApiServer) -> None:
        shared_api.client.post("/v1/stream-tickets")
        execute(shared_api, "UPDATE tokens SET expires_at = now() - interval '1 s'")
        shared_api.client.post("/v1/stream-tickets")
        with psycopg.connect(shared_api.settings.database_url or "") as connection:
            (count,) = connection.execute("SELECT count(*) FROM tokens").fetchone() or (None,)
        assert count == 1


class TestOtherOrigins:
    @pytest.fixture
    def open_api(self, shared_api: ApiServer) -> Iterator[ApiServer]:
        settings = shared_api.settings.model_copy(update={"allowed_origins": f"{DASHBOARD}, http://localhost:3000"})
        with ThreadServer(settings) as server:
            yield server

    def test_allowed_origin_reads_answers_and_errors_with_key_or_ticket(self, open_api: ApiServer) -> None:
        ticket = open_api.client.post("/v1/stream-tickets").json()["ticket"]
        preflight_headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        with open_api.client_with(None) as page:
            preflight = page.options("/v1/runs", headers={"Origin": DASHBOARD, **preflight_headers})
            stranger = page.options("/v1/runs", headers={"Origin": "https://evil.example", **preflight_headers})
            refused = page.get("/v1/runs", headers={"Origin": DASHBOARD})
            stream = page.get("/v1/events", params={"ticket": ticket, "follow": False}, headers={"Origin": DASHBOARD})
        body = {"name": new_id("exp")}
        written = open_api.client.post("/v1/experiments", json=body, headers={"Origin": DASHBOARD})
        elsewhere = open_api.client.get("/v1/runs", headers={"Origin": "https://evil.example"})
        allowed = [
            answer.headers.get("access-control-allow-origin") for answer in (preflight, refused, stream, written)
        ]
        assert allowed == [DASHBOARD] * 4 and written.status_code == 201 and refused.status_code == 401
        assert stranger.status_code == 400 and "access-control-allow-origin" not in {
            *stranger.headers,
            *elsewhere.headers,
        }
        assert "access-control-allow-credentials" not in preflight.headers

    def test_never_use_the_cookie(self, open_api: ApiServer) -> None:
        with signed_in(open_api, open_api.key) as browser:
            foreign = {"Origin": DASHBOARD, OWN_PAGE: "cross-site"}
            answers = [
                browser.get("/v1/runs", headers=foreign),
                browser.post("/v1/experiments", json={}, headers=foreign),
            ]
        assert [answer.status_code for answer in answers] == [401, 403]

    def test_sign_no_browser_in_even_with_a_key(self, open_api: ApiServer) -> None:
        """The browser would keep the cookie of a page on another port of the same host."""
        link = open_api.client.post("/v1/session/links").json()["url"].partition("#")[2]
        for body in ({"key": open_api.key}, {"link": link}):
            answer = open_api.client.post("/v1/session", json=body, headers={"Origin": DASHBOARD})
            assert (answer.status_code, code(answer)) == (403, "origin_not_allowed")
            assert "set-cookie" not in answer.headers

    def test_other_origin_with_wrong_key_and_valid_cookie_changes_nothing(self, open_api: ApiServer) -> None:
        with signed_in(open_api, open_api.key) as browser:
            sent = {"Origin": DASHBOARD, "Authorization": "Bearer anneal_" + "x" * 43}
            answer = browser.post("/v1/experiments", json={"name": "x"}, headers=sent)
        assert (answer.status_code, code(answer)) == (401, "invalid_key")

    @pytest.mark.parametrize(
        "wrong",
        [
            "null",
            "https://*.example",
            "https://u@a.example",
            "*",
            "https://a.example/path",
            "HTTPS://A.example",
            "a.example",
            "https://a.example/",
        ],
    )
    def test_allowed_origins_are_compared_exactly(self, wrong: str) -> None:
        with pytest.raises(ValueError, match="is not an origin"):
            Settings(allowed_origins=f"{DASHBOARD},{wrong}")


class TestDocs:
    def test_open_with_a_session_and_lead_a_browser_without_one_to_signing_in(
        self, shared_api: ApiServer, browser: httpx.Client
    ) -> None:
        assert browser.get("/docs").status_code == browser.get("/openapi.json").status_code == 200
        with shared_api.client_with(None) as stranger:
            page = stranger.get("/docs", headers={"Accept": "text/html,*/*"})
            program = stranger.get("/docs", headers={"Accept": "*/*"})
        assert (page.status_code, page.headers["location"]) == (303, "/login?next=%2Fdocs")
        assert program.status_code == 401 and code(program) == "missing_key"

    def test_list_both_ways_to_authenticate(self, browser: httpx.Client) -> None:
        document = browser.get("/openapi.json").json()
        assert set(document["components"]["securitySchemes"]) == {"key", "session"}
        assert document["paths"]["/v1/runs"]["get"]["security"] == [{"key": []}, {"session": []}]
        assert "security" not in document["paths"]["/v1/session"]["post"]


def test_signing_in_leaves_the_key_unchanged(shared_api: ApiServer) -> None:
    before = {key.id: key.scopes for key in list_keys_sync(shared_api.settings)}
    shared_api.client.post("/v1/session", json={"key": shared_api.key})
    assert {key.id: key.scopes for key in list_keys_sync(shared_api.settings)} == before
