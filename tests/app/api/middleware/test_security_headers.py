"""Promises to browsers: nothing that this server answers runs, is kept, is framed or is taken for something else."""

import html.parser
import socket
from collections.abc import Iterator

import httpx
import pytest

from app.api.docs_page import CONTENT_SECURITY_POLICY
from app.api.middleware.security_headers import DEFAULT_HEADERS, REQUIRED_HEADERS
from app.web import assets
from tests.app.routes import calls
from tests.server import ApiServer, ThreadServer

_ANY = "run_" + "0" * 26
_PAGES = {
    "/", "/compare", "/datasets", f"/datasets/{_ANY}", "/experiments", f"/experiments/{_ANY}", "/login", "/new",
    f"/runs/{_ANY}", "/try", "/webhooks", f"/webhooks/{_ANY}", "/workers",
}  # fmt: skip


def _every_answer(api: ApiServer) -> dict[tuple[str, str], httpx.Response]:
    assert isinstance(api, ThreadServer)
    answers = {}
    for method, path in [*calls(api.application.routes), ("GET", "/nowhere"), ("OPTIONS", "/v1/runs")]:
        body = None if method in ("GET", "HEAD") else {}
        with api.client.stream(method, path, json=body) as answers[method, path]:
            pass  # its body may be a stream that never ends
    assert {200, 404, 422} <= {answer.status_code for answer in answers.values()}
    return answers


def test_every_answer_forbids_a_browser_to_run_keep_and_guess_anything(shared_api: ApiServer) -> None:
    wrong = {}
    for call, answer in _every_answer(shared_api).items():
        reported = {name: answer.headers.get_list(name) for name in REQUIRED_HEADERS | DEFAULT_HEADERS}
        expected = {name: [value] for name, value in (REQUIRED_HEADERS | DEFAULT_HEADERS).items()}
        if call[1] == "/docs":
            expected["Content-Security-Policy"] = [CONTENT_SECURITY_POLICY]
        if call[1] in _PAGES:
            expected |= {"Content-Security-Policy": [assets.CONTENT_SECURITY_POLICY], "Cache-Control": ["no-cache"]}
        if call[1] == "/favicon.ico":
            expected["Cache-Control"] = ["public, max-age=86400"]
        if reported != expected or any(name.startswith("access-control") for name in answer.headers):
            wrong[call] = reported
    assert wrong == {}
    assert DEFAULT_HEADERS["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"


def test_refusals_have_the_same_headers(shared_api: ApiServer) -> None:
    with shared_api.client_with(None) as untrusted:
        refusals = [
            untrusted.get("/v1/runs"),
            untrusted.get("/healthz", headers={"Host": "evil.example"}),
            shared_api.client.get("/v1/runs", headers={"Host": "evil.example"}),
            shared_api.client.post("/v1/experiments", json={"name": "x"}, headers={"Origin": "null"}),
            shared_api.client.post("/v1/experiments", content=b"{", headers={"Content-Type": "application/json"}),
        ]
    assert [answer.status_code for answer in refusals] == [401, 200, 400, 403, 422]
    for answer in refusals:
        assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {str(value) for name, value in attrs if name in ("href", "src", "action")}


def test_the_page_of_docs_needs_no_script_and_no_other_host(shared_api: ApiServer) -> None:
    answer = shared_api.client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = _Page()
    page.feed(answer.text)
    assert not page.tags & {"script", "iframe", "object", "link", "img", "form", "base"}
    assert page.links == {"/openapi.json"}
    assert not any(name.startswith("on") or name == "style" for name in page.attributes)
    assert "unsafe" not in CONTENT_SECURITY_POLICY and "http" not in CONTENT_SECURITY_POLICY


def test_the_page_of_docs_has_every_call_and_its_examples(shared_api: ApiServer) -> None:
    text = shared_api.client.get("/docs").text
    document = shared_api.client.get("/openapi.json").json()
    for path, item in document["paths"].items():
        for method in item:
            assert f"<code>{method.upper()} {path}</code>" in text
    assert "&quot;base_model&quot;" in text and "idempotency-key" in text.lower()
    assert "<code>config.lora_r</code><td>integer, ≥ 1, ≤ 4096 or string or null<td>" in text and "Default: 16." in text


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("{url}", 201), ("{https}", 201), ("null", 403), ("NULL", 403), ("", 403), ("http://127.0.0.1", 403),
        ("http://127.0.0.1:1", 403), ("{url}/", 403), ("{url}.evil.example", 403), ("http://evil@{host}", 403),
        ("{url} {url}", 403), ("file://", 403), ("ftp://{host}", 403), ("{upper}", 201),
    ],
)  # fmt: skip
def test_an_origin_counts_only_when_it_is_exactly_ours(shared_api: ApiServer, origin: str, status: int) -> None:
    url = shared_api.url
    host = url.removeprefix("http://")
    sent = origin.format(url=url, https=url.replace("http", "https"), host=host, upper=url.upper())
    answer = shared_api.client.post("/v1/experiments", json={"name": "x"}, headers={"Origin": sent})
    assert answer.status_code == status


def _status(api: ApiServer, target: str, *headers: str) -> int:
    """What a raw request with these lines is answered with."""
    lines = [f"GET {target} HTTP/1.1", *headers, f"Authorization: Bearer {api.key}", "Connection: close", "", ""]
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        return int(connection.recv(4096).split()[1])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Host: localhost"], 200), (["Host: LOCALHOST:80"], 200), (["Host: [::1]"], 200), (["Host: [::1]:8700"], 200),
        (["Host: 127.0.0.1:8700"], 200), (["host: api.internal"], 200), (["Host: api.internal.:443"], 200),
        ([], 400), (["Host:"], 400), (["Host: localhost", "Host: localhost"], 400),
        (["Host: localhost", "Host: evil.example"], 400), (["Host: evil.example", "X-Forwarded-Host: localhost"], 400),
        (["Host: localhost.evil.example"], 400), (["Host: localhost, evil.example"], 400),
        (["Host: evil.example:80"], 400),
        (["Host: localhost@evil.example"], 400), (["Host: localhost:x@evil.example"], 400), (["Host: [::1]evil"], 400),
        (["Host: [::1"], 400), (["Host: localhost:"], 400), (["Host: localhost:80:80"], 400), (["Host: ::1"], 400),
        (["Host: [::ffff:127.0.0.1]"], 400), (["Host: 0.0.0.0"], 400), (["Host: 127.1"], 400),
        (["Host: 2130706433"], 400), (["Host: localhost.."], 400), (["Host: localhost/x"], 400),
    ],
)  # fmt: skip
def test_only_a_well_formed_known_host_is_answered(named: ApiServer, headers: list[str], status: int) -> None:
    assert _status(named, "/v1/experiments", *headers) == status


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/v1/experiments", "evil.example", 400),
        ("http://evil.example/v1/experiments", "evil.example", 400),
        ("http://evil.example/v1/experiments", "localhost", 200),
        ("//evil.example/v1/experiments", "evil.example", 400),
    ],
)
def test_an_absolute_target_gets_no_one_past_the_list_of_hosts(
    named: ApiServer, target: str, host: str, status: int
) -> None:
    """The header decides, whatever host the target names: no browser sends such a target to a server."""
    assert _status(named, target, f"Host: {host}") == status


@pytest.fixture(scope="module")
def named(shared_api: ApiServer) -> Iterator[ApiServer]:
    """A server with a name of its own."""
    with ThreadServer(shared_api.settings.model_copy(update={"allowed_hosts": "api.internal"})) as server:
        yield server


def test_bound_to_every_address_a_literal_address_is_answered_and_no_name(shared_api: ApiServer) -> None:
    """What is written in digits cannot be bound to another address by whoever owns a name."""
    with ThreadServer(shared_api.settings.model_copy(update={"host": "0.0.0.0"})) as server:
        for host, status in (("192.0.2.7", 200), ("[2001:db8::1]:80", 200), ("evil.example", 400), ("127.1", 400),
                             ("0x7f.0.0.1", 400), ("2130706433", 400), ("[fe80::1%25eth0]", 400)):  # fmt: skip
            assert _status(server, "/v1/experiments", f"Host: {host}") == status, host


def test_two_origins_are_none(shared_api: ApiServer) -> None:
    headers = [("Origin", shared_api.url), ("Origin", "http://evil.example")]
    assert shared_api.client.post("/v1/experiments", json={"name": "x"}, headers=headers).status_code == 403


def test_without_allowed_origins_no_page_of_another_site_reads_an_answer(shared_api: ApiServer) -> None:
    page = {"Origin": "https://dashboards.example.com"}
    preflight = {**page, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "authorization"}
    answers = [
        shared_api.client.get("/v1/runs", headers=page),
        shared_api.client.options("/v1/runs", headers=preflight),
        shared_api.client.get("/", headers=page),
    ]
    assert [name for answer in answers for name in answer.headers if name.startswith("access-control")] == []
