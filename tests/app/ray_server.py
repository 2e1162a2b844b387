"""A server on loopback that speaks the calls of Ray's Jobs API which are used, and can fail in every way."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENDED = {
    "STOPPED": "Job was intentionally stopped.",
    "SUCCEEDED": "Job finished successfully.",
    "FAILED": "Unexpected error occurred: failed to get job supervisor.",
}
"""Messages of Ray 2.60 about jobs that have ended; it has others for failures."""


class RayServer(ThreadingHTTPServer):
    """Jobs by their id; what was asked for is in `asked`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str]] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.stopped: list[str] = []
        self.token: str | None = None
        """Token that requests must have."""
        self.loses_responses = False
        """True: what is asked happens, and the connection is closed without a response."""
        self.failing: dict[str, int] = {}
        """Status with which requests of a method are answered, such as 500 for `POST`."""
        self.delay = 0.0
        """Seconds before each response."""
        self.nodes: list[dict[str, Any]] | None = None
        """Nodes as Ray lists them; None: it does not list them."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def submissions(self) -> list[str]:
        """Ids with which a submission was asked for, in order."""
        return [body["submission_id"] for body in self.bodies]

    def end(self, job_id: str, status: str, message: str | None = None, exit_code: int | None = None) -> None:
        """End a job, by default with the message of Ray."""
        message = ENDED.get(status, "") if message is None else message
        self.jobs[job_id] = {"status": status, "message": message, "driver_exit_code": exit_code}


class _Handler(BaseHTTPRequestHandler):
    server: RayServer

    def _is_refused(self) -> bool:
        if self.server.token is None or self.headers["authorization"] == f"Bearer {self.server.token}":
            return False
        self._answer(401, "Unauthorized")
        return True

    def do_GET(self) -> None:
        if self._is_refused():
            return None
        if self.path.startswith("/api/v0/nodes"):
            if self.server.nodes is None:
                return self._answer(404, "Not Found")
            return self._answer(200, {"result": True, "data": {"result": {"result": self.server.nodes}}})
        job = self.server.jobs.get(self.path.removeprefix("/api/jobs/"))
        return self._answer(*((200, job) if job else (404, "Job does not exist")))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if self._is_refused():
            return None
        if status := self.server.failing.get("POST"):
            return self._answer(status, "Traceback …\nNo available agent to submit job, please try again later.")
        if self.path != "/api/jobs/":
            job_id = self.path.removeprefix("/api/jobs/").removesuffix("/stop")
            self.server.stopped.append(job_id)
            if job_id not in self.server.jobs:
                return self._answer(404, f"Job {job_id} does not exist")
            self.server.end(job_id, "STOPPED")
            return self._answer(200, {"stopped": True})
        self.server.bodies.append(body)
        job_id = body["submission_id"]
        if job_id in self.server.jobs:
            return self._answer(500, f"Traceback …\nValueError: Job with submission_id {job_id} already exists.\n")
        self.server.jobs[job_id] = {"status": "PENDING", "message": "Job has not started yet."}
        return self._answer(200, {"job_id": job_id, "submission_id": job_id})

    def _answer(self, status: int, document: Any) -> None:
        self.server.asked.append((self.command, self.path))
        self.server.tokens.add(self.headers["authorization"])
        threading.Event().wait(self.server.delay)
        if self.server.loses_responses:
            self.close_connection = True
            return
        content = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def ray_server() -> Iterator[RayServer]:
    """Serve until the end of the block."""
    server = RayServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
