"""Promises about clients that send slowly, without an end, or far too much: each costs little, and for a short time."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from app.api import uvicorn_protocol
from app.config import Settings
from app.infra.db import sync_engine
from tests.nodes import ROOT
from tests.rows import add_run
from tests.server import ApiServer, ProcessServer, ThreadServer
from tests.waiting import eventually

_MEGABYTE = b"x" * 2**20
_CHUNKED = b"POST /v1/experiments HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
_TRAILERS = b"A: xxxxxxx\r\n" * (2**20 // 12)


@pytest.fixture
def hasty(shared_api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A server that waits for no client longer than a moment."""
    monkeypatch.setattr(uvicorn_protocol, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(uvicorn_protocol, "UNREAD_BODY_SECONDS", 0.5)
    monkeypatch.setattr(uvicorn_protocol, "UNREAD_RESPONSE_SECONDS", 0.5)
    yield shared_api


def _connect(api: ApiServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", api.port), timeout=10)


def _is_open(api: ApiServer, connection: socket.socket) -> bool:
    """Return True while the server, which is a thread of this process, has its end of a connection."""
    own_port, connections = connection.getsockname()[1], psutil.Process().net_connections("tcp")
    return any(one.laddr.port == api.port and one.raddr and one.raddr.port == own_port for one in connections)


def _seconds_until_closed(connection: socket.socket, drip: bytes) -> float:
    """How long a client may send a byte now and then."""
    started = time.monotonic()

    def is_closed() -> bool:
        try:
            connection.sendall(drip)
            connection.settimeout(0.05)
            return connection.recv(4096) == b""
        except TimeoutError:
            return False
        except OSError:
            return True

    eventually(is_closed, timeout=60)
    return time.monotonic() - started


@pytest.mark.parametrize("begin", [b"", b"GET /heal", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_headers_that_never_end_are_not_waited_for(hasty: ApiServer, begin: bytes) -> None:
    with _connect(hasty) as connection:
        connection.sendall(begin)
        assert 0.3 < _seconds_until_closed(connection, b"a" if begin else b"") < 15


def test_headers_of_a_further_request_on_the_same_connection_have_the_same_bound(hasty: ApiServer) -> None:
    with _connect(hasty) as connection:
        for _ in range(2):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /healthz HTTP/1.1\r\nX-A: ")
        assert _seconds_until_closed(connection, b"a") < 15


def test_a_refused_body_is_not_taken_for_ever(hasty: ApiServer) -> None:
    with _connect(hasty) as connection:
        connection.sendall(b"POST /v1/datasets HTTP/1.1\r\nHost: localhost\r\nContent-Length: 209715200\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        assert 0.3 < _seconds_until_closed(connection, b"x") < 15


def test_a_download_that_is_not_read_is_ended(hasty: ApiServer) -> None:
    row = b'{"text": "' + _MEGABYTE + b'"}\n'
    dataset = hasty.client.post("/v1/datasets", files={"file": ("rows.jsonl", row * 20)}).json()
    head = f"Host: localhost\r\nAuthorization: Bearer {hasty.key}\r\n\r\n"
    with _connect(hasty) as connection:
        connection.sendall(f"GET /v1/datasets/{dataset['id']}/content HTTP/1.1\r\n{head}".encode())
        eventually(lambda: connection.recv(1) == b"H")
        assert _is_open(hasty, connection)
        eventually(lambda: not _is_open(hasty, connection), timeout=15)


@pytest.mark.parametrize("begin", [b"", b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody"])
def test_empty_lines_between_requests_do_not_keep_a_connection_open(hasty: ApiServer, begin: bytes) -> None:
    with _connect(hasty) as connection:
        connection.sendall(begin or b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 4" if begin else b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        assert 0.3 < _seconds_until_closed(connection, b"") < 4  # uvicorn itself waits for five seconds or for ever


def test_a_long_stream_is_not_ended_by_these_bounds(hasty: ApiServer) -> None:
    """A whole request has no bound of time: an answer may take as long as a run does."""
    body = b'{"name": "slow"}'
    head = f"POST /v1/experiments HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {hasty.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with _connect(hasty) as connection:
        connection.sendall(head.encode())
        began = time.monotonic()
        eventually(lambda: time.monotonic() - began > 1.2)
        connection.sendall(body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 201")


@pytest.mark.parametrize("begin", [b"GET /", b"GET /healthz HTTP/1.1\r\nX-A: ", b"GET /healthz HTTP/1.1\r\nX-"])
def test_headers_without_an_end_cost_no_memory(shared_api: ApiServer, begin: bytes) -> None:
    sent = 0
    with _connect(shared_api) as connection:
        try:
            connection.sendall(begin)
            for _ in range(64):
                connection.sendall(_MEGABYTE)
                sent += 1
        except OSError:
            pass
        assert sent < 64


@pytest.mark.parametrize(
    ("begin", "drip"),
    [
        (b"1\r\n{\r\n0\r\nX-", _MEGABYTE),
        (b"1\r\n{\r\n0\r\n", _TRAILERS),
        (b"1;", _MEGABYTE),
        (b"0;", _MEGABYTE),
        (b"0\r\n\r\n", b"\r\n" * 2**19),
    ],
    ids=["a name", "fields", "an extension of a chunk", "of the last chunk", "empty lines"],
)
@pytest.mark.parametrize("has_key", [False, True], ids=["without a key", "with a key"])
def test_trailers_without_an_end_cost_no_memory(
    shared_api: ApiServer, has_key: bool, begin: bytes, drip: bytes
) -> None:
    key = f"Authorization: Bearer {shared_api.key}\r\n".encode() if has_key else b""
    sent = 0
    with _connect(shared_api) as connection:
        try:
            connection.sendall(_CHUNKED.replace(b"\r\n\r\n", b"\r\n" + key + b"\r\n") + begin)
            for _ in range(64):
                connection.sendall(drip)
                sent += 1
        except OSError:
            pass
        assert sent < 64


class TestUnreadResponses:
    """What was sent to clients that do not read it waits in the memory of the process."""

    @pytest.fixture
    def path(self, shared_api: ApiServer) -> str:
        row = b'{"text": "' + _MEGABYTE + b'"}\n'
        dataset = shared_api.client.post("/v1/datasets", files={"file": ("rows.jsonl", row * 20)}).json()
        return f"/v1/datasets/{dataset['id']}/content"

    def _open(self, api: ApiServer, path: str, key: str) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", api.port))
        connection.settimeout(20)
        head = f"Host: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"
        connection.sendall(f"GET {path} HTTP/1.1\r\n{head}".encode())
        assert connection.recv(12) == b"HTTP/1.1 200"
        return connection

    def _length(self, connection: socket.socket) -> int:
        """Read the rest of a response; return its number of bytes until the connection was closed or it was whole."""
        length = 0
        with suppress(ConnectionError):
            while length < 20 * 2**20 and (piece := connection.recv(2**20)):
                length += len(piece)
        return length

    def test_beyond_the_limit_are_dropped_oldest_first_of_the_key_with_most(
        self, shared_api: ApiServer, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(uvicorn_protocol, "MAX_UNREAD_BYTES", 2**19)
        other = shared_api.key_with(["read"])
        with ExitStack() as connections:
            of_another = connections.enter_context(self._open(shared_api, path, other))
            opened = [connections.enter_context(self._open(shared_api, path, shared_api.key)) for _ in range(12)]
            eventually(lambda: not _is_open(shared_api, opened[0]), timeout=20)
            assert self._length(opened[0]) < 20 * 2**20
            for connection in (of_another, opened[-1]):
                assert self._length(connection) >= 20 * 2**20


class TestManyFields:
    """Fields of a few bytes each, which take fifty times as much memory once they are parsed."""

    def _answer(self, api: ApiServer, sent: bytes) -> bytes:
        answer = b""
        with _connect(api) as connection:
            connection.sendall(sent)
            with suppress(ConnectionError):
                while piece := connection.recv(65536):
                    answer += piece
        return answer

    @pytest.mark.parametrize(
        ("sent", "status", "code"),
        [
            (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 15_000, 431, "too_many_headers"),
            (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 2**17, 431, "headers_too_large"),
            (b"GET /healthz HTTP/1.1\r\nHost localhost\r\n\r\n", 400, "invalid_http"),
            (b"\x16\x03\x01 a client that speaks TLS", 400, "invalid_http"),
        ],
        ids=["fields", "bytes", "no HTTP", "TLS"],
    )
    def test_too_many_headers_are_refused_before_they_end(
        self, shared_api: ApiServer, sent: bytes, status: int, code: str
    ) -> None:
        head, _, body = self._answer(shared_api, sent).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert b"content-type: application/problem+json" in head and b"connection: close" in head
        problem = json.loads(body)
        assert (problem["status"], problem["code"]) == (status, code) and problem["detail"].endswith(".")

    def test_usual_number_of_headers_is_accepted(self, shared_api: ApiServer) -> None:
        most = uvicorn_protocol.MAX_HEADER_FIELDS
        request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        assert self._answer(shared_api, request + b"a: b\r\n" * (most - 2) + b"\r\n").startswith(b"HTTP/1.1 200")
        assert self._answer(shared_api, request + b"a: b\r\n" * (most - 1) + b"\r\n").startswith(b"HTTP/1.1 431")

    def test_too_many_headers_after_a_response_began_close_the_connection(self, shared_api: ApiServer) -> None:
        stream = f"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {shared_api.key}\r\n\r\n"
        with _connect(shared_api) as connection:
            connection.sendall(stream.encode())
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            connection.sendall(b"GET /healthz HTTP/1.1\r\n" + b"a:\r\n" * 1000)
            with suppress(ConnectionError):
                while piece := connection.recv(65536):
                    answer += piece
        assert answer.count(b"HTTP/1.1 ") == 1

    def test_too_many_trailers_are_refused(self, shared_api: ApiServer) -> None:
        begin = _CHUNKED.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {shared_api.key}\r\n\r\n".encode())
        answer = self._answer(shared_api, begin + b"1\r\n{\r\n0\r\n" + b"a:\r\n" * 1000)
        assert answer.startswith(b"HTTP/1.1 431") and b"too_many_headers" in answer

    def test_headers_of_pipelined_requests_are_bounded_together(self, shared_api: ApiServer) -> None:
        request = _REQUEST.removesuffix(b"\r\n") + b"a:\r\n" * 60 + b"\r\n"
        assert self._answer(shared_api, request * 16).count(b'{"status":"ok"}') < 16

    def test_too_many_query_fields_are_refused(self, shared_api: ApiServer) -> None:
        for many in ("&".join(f"p{at}=" for at in range(9000)), "&".join(["status=pending"] * 101)):
            response = shared_api.client.get(f"/v1/runs?{many}")
            assert response.status_code == 422 and response.elapsed.total_seconds() < 5
            assert [error["code"] for error in response.json()["errors"]] == ["too_many_parameters"]
        assert shared_api.client.get("/v1/runs?" + "&".join(["status=pending"] * 100)).status_code == 200


class TestFieldsOfTrailers:
    """Everything arrives at once, so a trailer is read before the request is answered."""

    @pytest.fixture
    def key(self, shared_api: ApiServer) -> bytes:
        return f"Authorization: Bearer {shared_api.key}\r\n".encode()

    def _answer(self, api: ApiServer, head: bytes, trailers: bytes, following: bytes = b"", *, until: bytes) -> bytes:
        begin = b"POST /v1/experiments HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        body = b'10\r\n{"name": "later"\r\n1\r\n}\r\n0\r\n'
        answer = b""
        with _connect(api) as connection:
            connection.sendall(begin + head + b"\r\n" + body + trailers + b"\r\n" + following)
            while until not in answer and (piece := connection.recv(65536)):
                answer += piece
        return answer

    def test_a_key_is_none(self, shared_api: ApiServer, key: bytes) -> None:
        answer = self._answer(shared_api, b"Host: localhost\r\n", key, until=b"missing_key")
        assert answer.startswith(b"HTTP/1.1 401")

    def test_a_host_is_none(self, shared_api: ApiServer, key: bytes) -> None:
        answer = self._answer(shared_api, key, b"Host: localhost\r\n", until=b"host_not_allowed")
        assert answer.startswith(b"HTTP/1.1 400")

    def test_trailer_fields_harm_neither_their_request_nor_the_next(self, shared_api: ApiServer, key: bytes) -> None:
        trailers = b"Host: evil.example\r\nAuthorization: Basic x\r\nExpect: 100-continue\r\nX:\r\n"
        following = b"GET /v1/experiments HTTP/1.1\r\nHost: localhost\r\n" + key + b"\r\n"
        answer = self._answer(shared_api, b"Host: localhost\r\n" + key, trailers, following, until=b"HTTP/1.1 200")
        assert answer.startswith(b"HTTP/1.1 201")


class TestPipelining:
    """Requests that are sent before the responses to earlier ones."""

    def _answers(self, api: ApiServer, requests: int) -> int:
        received = b""
        with _connect(api) as connection:
            connection.sendall(_REQUEST * requests)
            try:
                while received.count(b'{"status":"ok"}') < requests and (piece := connection.recv(65536)):
                    received += piece
            except ConnectionError:
                pass
        return received.count(b'{"status":"ok"}')

    def test_a_few_requests_are_answered_and_very_many_end_the_connection(self, shared_api: ApiServer) -> None:
        most = 1 + uvicorn_protocol.MAX_WAITING_REQUESTS
        assert self._answers(shared_api, most) == most
        assert self._answers(shared_api, 1000) < 1000

    def test_a_stream_ends_with_its_connection_although_another_request_waits(self, emptied_api: ApiServer) -> None:
        head = f"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {emptied_api.key}\r\n\r\n"

        def streams() -> float:
            text = emptied_api.client.get("/metrics").text
            return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("anneal_streams{"))

        with _connect(emptied_api) as connection:
            connection.sendall(head.encode() + _REQUEST)
            eventually(lambda: streams() == 1)
        eventually(lambda: streams() == 0, timeout=8)


def _send_trailers(api: ApiServer) -> None:
    """Send trailers without an end until the connection is refused."""
    with suppress(OSError), _connect(api) as connection:
        connection.sendall(_CHUNKED + b"0\r\n")
        while True:
            connection.sendall(_TRAILERS)


def _slowest_answer_beside(api: ApiServer, attack: Callable[[ApiServer], None]) -> float:
    """Seconds of the slowest of 30 calls of `/healthz` while three clients repeat an attack."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            attack(api)

    attackers = [threading.Thread(target=repeat) for _ in range(3)]
    for attacker in attackers:
        attacker.start()
    try:
        return max(api.client.get("/healthz").raise_for_status().elapsed.total_seconds() for _ in range(30))
    finally:
        over.set()
        for attacker in attackers:
            attacker.join()


class TestHttp10:
    """Clients of HTTP/1.0, such as a plain proxy, know no chunks: the end of the connection ends a stream."""

    def respond(self, api: ApiServer, method: str, path: str) -> tuple[str, bytes]:
        head = f"{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {api.key}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", api.port), timeout=20) as connection:
            connection.sendall(head.encode())
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        headers, _, body = received.partition(b"\r\n\r\n")
        return headers.decode().lower(), body

    def test_a_stream_is_sent_without_chunks(self, emptied_api: ApiServer) -> None:
        engine = sync_engine(emptied_api.settings.database_url or "", pool_size=0)
        run_id = add_run(engine).id
        headers, body = self.respond(emptied_api, "GET", f"/v1/runs/{run_id}/events?follow=false")
        assert " 200 ok" in headers and "transfer-encoding" not in headers and "connection: close" in headers
        lines = [line.partition(b": ")[0] for line in body.splitlines() if line]
        assert b"data" in lines and set(lines) <= {b"data", b"id", b"event", b"retry", b""}

    @pytest.mark.parametrize("method", ["GET", "HEAD"])
    def test_a_response_of_known_length_is_whole(self, shared_api: ApiServer, method: str) -> None:
        headers, body = self.respond(shared_api, method, "/v1/experiments")
        length = next((line for line in headers.splitlines() if line.startswith("content-length")), "")
        assert method == "HEAD" or int(length.partition(":")[2]) == len(body) > 0


def test_two_hundred_megabytes_without_a_key_leave_no_byte(settings: Settings) -> None:
    """All of them are sent, over a connection that was refused with its first kilobyte; and thirty of trailers.

    Then 200 connections with 15,000 headers each, and 160,000 requests whose responses are not read.
    """
    with ProcessServer(settings) as api:
        process = psutil.Process(api.process.pid)
        before = process.memory_info().rss
        peak = before
        with _connect(api) as connection:
            connection.sendall(
                b"POST /v1/datasets HTTP/1.1\r\nHost: localhost\r\nContent-Length: 209715200\r\n"
                b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
            )
            try:
                for _ in range(200):
                    connection.sendall(_MEGABYTE)
                    peak = max(peak, process.memory_info().rss)
            except OSError:
                pass  # cut off: fine too
            else:
                assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        with _connect(api) as connection:
            connection.sendall(_CHUNKED + b"0\r\n")
            try:
                for _ in range(30):
                    connection.sendall(_TRAILERS)
                    peak = max(peak, process.memory_info().rss)
            except OSError:
                pass
        with ExitStack() as connections:
            for _ in range(200):
                connection = connections.enter_context(_connect(api))
                with suppress(OSError):  # the connection may have been refused already
                    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 15_000)
            for _ in range(20):
                peak = max(peak, process.memory_info().rss)
                assert api.client.get("/healthz").elapsed.total_seconds() < 5
        assert _slowest_answer_beside(api, _send_trailers) < 3
        with ExitStack() as connections:
            for _ in range(8):
                connection = connections.enter_context(_connect(api))
                connection.setblocking(False)
                connection.send(_REQUEST * 20_000)  # the responses are not read
            for _ in range(50):
                assert api.client.get("/healthz").elapsed.total_seconds() < 5
                peak = max(peak, process.memory_info().rss)
        assert api.client.get("/healthz").elapsed.total_seconds() < 5
        files = [path for path in Path(settings.storage_root).rglob("*") if path.is_file()]
        assert files == []
        assert peak - before < 32 * 2**20, f"{(peak - before) / 2**20:.1f} MiB"


def test_the_bounds_hold_where_the_service_is_served() -> None:
    source = (ROOT / "app" / "server.py").read_text()
    assert "http=Protocol" in source
    assert (
        issubclass(ThreadServer, ApiServer)
        and uvicorn_protocol.HEAD_SECONDS <= 30
        and uvicorn_protocol.UNREAD_RESPONSE_SECONDS <= 600
        and uvicorn_protocol.MAX_HEADER_BYTES <= 2**17
    )
