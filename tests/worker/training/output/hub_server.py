"""A stand-in for the Hugging Face hub: as much of its API as an upload uses, on a real socket."""

import base64
import json
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = 10_000
"""Bytes up to which a file travels within the commit; a larger one goes to the storage of large files (Xet)."""


class Hub:
    """What arrived, and how the next requests are to go wrong."""

    def __init__(self) -> None:
        self.url = ""
        self.tokens: set[str | None] = set()
        self.repositories: list[dict[str, Any]] = []
        self.storage = ""
        """Folder that the client uses in place of a server of large files."""
        self.commits: list[dict[str, bytes | str]] = []
        """Of each the files by their path: the bytes of a small one, the SHA-256 of a large one."""
        self.role = "write"
        """What the token may do."""
        self.answers: deque[tuple[str, int]] = deque()
        """Failures to come: the next request with this in its path gets this status."""
        self.never_answers = ""
        """Requests with this in their path wait until the server ends."""
        self.asked = threading.Event()
        """Such a request has come."""
        self.ends = threading.Event()

    @contextmanager
    def open(self) -> Iterator["Hub"]:
        """Serve."""
        hub = self

        class Handler(_Handler):
            at = hub

        with serving(Handler) as self.url, tempfile.TemporaryDirectory() as self.storage:
            try:
                yield self
            finally:
                self.ends.set()


class _Handler(BaseHTTPRequestHandler):
    at: Hub

    def do_POST(self) -> None:
        body = self._body()
        self.at.tokens.add(self.headers.get("Authorization"))
        if self._goes_wrong():
            return
        kinds: dict[str, Callable[[bytes], Any]] = {
            "/api/repos/create": self._create, "/api/validate-yaml": lambda _: {"errors": [], "warnings": []},
            "/preupload/": self._modes, "/commit/": self._commit,
        }  # fmt: skip
        self._answer(next(make for part, make in kinds.items() if part in self.path)(body))

    def do_GET(self) -> None:
        if self._goes_wrong():
            return
        if self.path == "/api/whoami-v2":
            access = {"accessToken": {"displayName": "push", "role": self.at.role}}
            self._answer({"name": "ada", "orgs": [{"name": "analysts"}], "auth": access})
        else:
            assert "/xet-write-token/" in self.path, self.path
            expires = int(time.time()) + 3600
            self._answer({"accessToken": "any", "exp": expires, "casUrl": f"local://{self.at.storage}"})

    def _create(self, body: bytes) -> Any:
        self.at.repositories.append(json.loads(body))
        return {"url": f"{self.at.url}/ada/tuned", "id": "1"}

    def _modes(self, body: bytes) -> Any:
        return {
            "files": [
                {"path": file["path"], "uploadMode": "regular" if file["size"] <= SMALL else "lfs",
                 "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
        }  # fmt: skip

    def _commit(self, body: bytes) -> Any:
        files: dict[str, bytes | str] = {}
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = value["oid"]
        self.at.commits.append(files)
        return {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.at.url}/ada/tuned/commit/{COMMIT}"}

    def _goes_wrong(self) -> bool:
        if self.at.never_answers and self.at.never_answers in self.path:
            self.at.asked.set()
            self.at.ends.wait(60)
            return True
        if self.at.answers and self.at.answers[0][0] in self.path:
            self._answer({"error": "not now"}, self.at.answers.popleft()[1])
            return True
        return False

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, reported: Any, status: int = 200) -> None:
        body = json.dumps(reported).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...
