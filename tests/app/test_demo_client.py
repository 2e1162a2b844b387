"""What the demo promises of the way it listens."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from app.demo.client import Client, DemoError

FRAMES = {
    seq: f'id: {seq}\nevent: {kind}\ndata: {{"n": {seq}}}\n\n'.encode()
    for seq, kind in ((1, "status"), (2, "metric"), (3, "metric"), (4, "end"))
}


class Streams(BaseHTTPRequestHandler):
    """Sends two events after the cursor and hangs up; `run_gap` forgets one, `run_none` does not exist."""

    cursors: list[str | None] = []

    def do_GET(self) -> None:
        cursor = self.headers.get("Last-Event-ID")
        self.cursors.append(cursor)
        if "run_none" in self.path:
            self._answer(404, "application/problem+json", b'{"detail": "There is no such run.", "status": 404}')
            return
        after = int(cursor or 0)
        wanted = (1, 3) if "run_gap" in self.path else (after + 1, after + 2)
        # A length that is not reached: the connection breaks in mid-stream.
        self._answer(200, "text/event-stream", b": hello\n\n" + b"".join(FRAMES[seq] for seq in wanted), missing=99)

    def _answer(self, status: int, kind: str, body: bytes, missing: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a service that hangs up."""
    Streams.cursors = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streams)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    one = Client(f"http://127.0.0.1:{server.server_port}", "key")
    yield one
    one.close()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_lost_connection_is_taken_up_after_the_last_event_seen(client: Client) -> None:
    assert [(event.seq, event.data["n"]) for event in client.follow("run_cut")] == [(seq, seq) for seq in range(1, 5)]
    assert Streams.cursors == [None, "2"]


def test_an_event_that_is_missing_is_told_and_not_passed_over(client: Client) -> None:
    with pytest.raises(DemoError, match="from event 1 to 3"):
        list(client.follow("run_gap"))


def test_a_refusal_is_told_in_the_words_of_the_service(client: Client) -> None:
    with pytest.raises(DemoError, match=r"GET /v1/runs/run_none/events answered 404: There is no such run\."):
        list(client.follow("run_none"))
