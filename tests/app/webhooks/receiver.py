"""A receiver of webhooks on loopback, whose answers a test decides by path."""

import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.waiting import eventually


class Message(NamedTuple):
    """Request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


class Receiver(ThreadingHTTPServer):
    """Receiver with its messages, in the order of their arrival."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.messages: list[Message] = []
        self.statuses: dict[str, list[int]] = defaultdict(list)
        """Statuses of the next responses by path; 200 when they are used up."""
        self.held: dict[str, threading.Event] = {}
        """Paths whose requests wait for an event before they are answered."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def at(self, path: str) -> list[Message]:
        """Return the messages to a path."""
        return [message for message in self.messages if message.path == path]

    def wait_for(self, path: str, count: int = 1) -> list[Message]:
        """Return the messages to a path, once there are so many."""
        return eventually(lambda: self.at(path) if len(self.at(path)) >= count else [], what=f"messages to {path}")


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.messages.append(Message(self.path, headers, body))
        if self.path in self.server.held:
            self.server.held[self.path].wait(60)
        statuses = self.server.statuses[self.path]
        self.send_response(statuses.pop(0) if statuses else 200)
        self.send_header("Location", f"{self.server.url}/redirected")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass
