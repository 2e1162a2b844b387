"""A service of rewards on loopback, whose responses a test decides."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Call(NamedTuple):
    """Request as it arrived."""

    path: str
    headers: dict[str, str]
    json: Any
    moment: float
    """Monotonic time."""


class Reply(NamedTuple):
    """Response of the service."""

    body: Any = None
    """JSON value, or the bytes to send."""
    status: int = 200
    headers: dict[str, str] = {}
    held_by: threading.Event | None = None
    """Event that the response waits for."""


class RewardService(ThreadingHTTPServer):
    """Service that answers with the next reply of `replies`, or with what `answer` returns for the body."""

    daemon_threads = True

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.replies: list[Reply] = []
        self.calls: list[Call] = []
        self.lock = threading.Lock()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/score"


class _Handler(BaseHTTPRequestHandler):
    server: RewardService

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.server.lock:
            self.server.calls.append(Call(self.path, headers, body, time.monotonic()))
            reply = self.server.replies.pop(0) if self.server.replies else None
        if reply is None:
            reply = Reply(self.server.answer(body))
        if reply.held_by is not None:
            reply.held_by.wait(60)
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {"content-length": str(len(content)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(content)
        except OSError:
            pass  # the client did not wait for it

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def reward_service(answer: Callable[[Any], Any]) -> Iterator[RewardService]:
    """Provide a service, and end it afterwards."""
    with RewardService(answer) as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield service
        service.shutdown()
        thread.join()


def length_scores(body: Any) -> dict[str, Any]:
    """Score completions by their length in characters."""
    return {"scores": [len(row["completion"]) for row in body["rows"]]}
