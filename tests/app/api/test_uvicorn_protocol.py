"""Promises about clients that send slowly, without an end, or far too much: each costs little, and for a short time."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.api import uvicorn_protocol
from app.config import Settings
from tests.nodes import ROOT
from tests.server import ApiServer, ProcessServer, ThreadServer
from tests.waiting import eventually

_MEGABYTE = b"x" * 2**20


@pytest.fixture
def hasty(shared_api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A server that waits for no client longer than a moment."""
    monkeypatch.setattr(uvicorn_protocol, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(uvicorn_protocol, "UNREAD_BODY_SECONDS", 0.5)
    yield shared_api


def _connect(api: ApiServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", api.port), timeout=10)


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


def test_two_hundred_megabytes_without_a_key_leave_no_byte(settings: Settings) -> None:
    """All of them are sent, over a connection that was refused with its first kilobyte."""
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
        files = [path for path in Path(settings.storage_root).rglob("*") if path.is_file()]
        assert files == []
        assert peak - before < 32 * 2**20, f"{(peak - before) / 2**20:.1f} MiB"


def test_the_bounds_hold_where_the_service_is_served() -> None:
    source = (ROOT / "app" / "server.py").read_text()
    assert "http=Protocol" in source
    assert (
        issubclass(ThreadServer, ApiServer)
        and uvicorn_protocol.HEAD_SECONDS <= 30
        and uvicorn_protocol.MAX_HEADER_BYTES <= 2**17
    )
