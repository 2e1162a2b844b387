"""A server on loopback that speaks the few calls of the Hugging Face hub which are used."""

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" * 6 + "c0ff"


class Hub(ThreadingHTTPServer):
    """Repositories as paths and contents; what was asked for is in `asked`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.tokens: dict[str, str | None] = {}
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        """Status and `X-Error-Code` by path, or `X-Error-Message` if it is a sentence."""
        self.is_silent = False
        """True: requests are read and never answered."""
        self.silence_ended = threading.Event()
        self.redirect_megabytes = 0
        """Size of the body of each redirect."""
        self.sent_megabytes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def serve(self, files: dict[str, bytes]) -> None:
        """The dataset `ada/words` with these files, at one commit of its main branch."""
        siblings = [{"rfilename": path} for path in files]
        self.files["/api/datasets/ada/words/revision/main"] = json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
        for path, content in files.items():
            self.files[f"/datasets/ada/words/resolve/{COMMIT}/{path}"] = content


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.tokens[self.path] = self.headers["authorization"]
        if self.path in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[self.path])
            self.send_header("Content-Length", str(self.server.redirect_megabytes * 2**20))
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(self.server.redirect_megabytes):
                    self.wfile.write(bytes(2**20))
                    self.server.sent_megabytes += 1
            return
        if self.server.is_silent:
            self.server.silence_ended.wait(60)
            return
        content = self.server.files.get(self.path)
        status, code = self.server.refusals.get(self.path, (404 if content is None else 200, None))
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Message" if " " in code else "X-Error-Code", code)
        self.send_header("Content-Length", str(len(content or b"")))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.silence_ended.set()
        server.shutdown()
        thread.join(timeout=10)
