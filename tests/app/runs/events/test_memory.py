"""Memory of an API process with 300 readers that take nothing, of a run that sends the largest records it may."""

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app.config import Settings
from tests.factories import Trainer, make_dataset, make_run
from tests.server import ProcessServer
from tests.waiting import eventually

READERS = 300
MOST_ADDED = 300 * 2**20
MOST_KEPT = 100 * 2**20
RECORD_BYTES = 120_000


@pytest.fixture
def server(settings: Settings) -> Iterator[ProcessServer]:
    """An API process of its own, whose memory nothing else uses."""
    with ProcessServer(settings) as server:
        yield server


def _memory(server: ProcessServer, field: str) -> int:
    """Return `VmRSS` or `VmHWM` (the highest so far) of the server in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, flags=re.MULTILINE)
    assert match
    return int(match[1]) * 1024


def _reader(server: ProcessServer, path: str) -> socket.socket:
    """Request a stream, and read nothing of it."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", server.port))
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.key}\r\n\r\n"
    reader.sendall(head.encode())
    return reader


def _has_begun(reader: socket.socket) -> bool:
    """Return True once the first event has arrived; it stays in the socket."""
    reader.setblocking(False)
    try:
        return b"\nid: " in reader.recv(2048, socket.MSG_PEEK)
    except BlockingIOError:
        return False


def _open_streams(server: ProcessServer) -> int:
    metrics = server.client.get("/metrics").text
    return round(sum(float(count) for count in re.findall(r"^anneal_streams\{.*\} (\S+)$", metrics, re.MULTILINE)))


def test_300_readers_that_take_nothing_of_a_hostile_run_stay_below_300_mb_and_the_memory_returns(
    server: ProcessServer, engine: Engine
) -> None:
    trainer = Trainer(engine, make_run(server.client, make_dataset(engine))["id"]).begin()
    records = [{"step": 1, "prompt": "x" * RECORD_BYTES, "completion": ""}] * 20
    for _ in range(READERS // len(records)):
        trainer.events("sample", *records)
    path = f"/v1/runs/{trainer.run_id}/events"
    assert server.client.get(f"{path}?after=1&follow=false&types=end").status_code == 200
    idle = _memory(server, "VmRSS")
    with ExitStack() as readers:
        # Each from another place, so that no two share what was read.
        opened = [readers.enter_context(_reader(server, f"{path}?after={number}")) for number in range(READERS)]
        for reader in opened:
            eventually(lambda reader=reader: _has_begun(reader), what="every reader has its first event")
        for _ in range(4):
            trainer.events("sample", *records)
        assert _memory(server, "VmHWM") - idle < MOST_ADDED
    eventually(lambda: _open_streams(server) == 0, what="all streams are closed")
    eventually(lambda: _memory(server, "VmRSS") - idle < MOST_KEPT, what="the memory is returned")
