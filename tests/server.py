"""Real uvicorn servers: in a thread for a fast start, or in a process that tests can kill."""

import functools
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType

import httpx
import uvicorn
from starlette.routing import BaseRoute

from app.api.uvicorn_protocol import Protocol
from app.api_keys.service import create_key_sync
from app.config import Settings
from app.main import create_app
from tests import programs
from tests.ports import free_port
from tests.waiting import eventually


@functools.cache
def _prepared_routes() -> list[BaseRoute]:
    """Return the routes that all servers of this process share; they do not depend on the settings."""
    unused = Settings(database_url="postgresql://nobody@localhost/none", redis_url="redis://localhost")
    return create_app(unused).router.routes


class ApiServer(ABC):
    """API server of a test: `url`, an admin `key` and a `client` that sends it."""

    def __init__(self, settings: Settings, port: int | None = None) -> None:
        self.settings = settings
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = create_key_sync(settings, "test", ["admin"])
        self.client = self.client_with(self.key)

    def client_with(self, key: str | None) -> httpx.Client:
        """Return a client that sends this key, or no key."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # A server closes idle connections after five seconds: one that is reused at that moment is reset.
        limits = httpx.Limits(keepalive_expiry=2)
        # No TLS here, and loading the certificates takes longer than most requests.
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=60, trust_env=False, verify=False, limits=limits
        )

    def key_with(self, scopes: Iterable[str]) -> str:
        """Create another key with these scopes."""
        return create_key_sync(self.settings, "further", scopes)

    @abstractmethod
    def start(self) -> None:
        """Start serving."""

    @abstractmethod
    def stop(self) -> None:
        """Stop gracefully."""

    def wait_until_up(self) -> None:
        """Wait until the server responds."""
        eventually(self._answers, timeout=30, what="GET /healthz")

    def _answers(self) -> bool:
        try:
            return self.client.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> "ApiServer":
        self.start()
        self.wait_until_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.stop()


class ThreadServer(ApiServer):
    """Server in a thread of the test process."""

    def __init__(self, settings: Settings) -> None:
        # Bound from the start: two test processes may search for a free port at the same time.
        self._listening = socket.create_server(("127.0.0.1", 0))
        super().__init__(settings, self._listening.getsockname()[1])

    def start(self) -> None:
        if self._listening.fileno() < 0:  # it was stopped
            self._listening = socket.create_server(("127.0.0.1", self.port))
        self.application = create_app(self.settings)
        # FastAPI prepares a route for its first request, which takes longer than the other parts of a start.
        self.application.router.routes = [*_prepared_routes()]
        config = uvicorn.Config(
            self.application,
            host="127.0.0.1",
            port=self.port,
            log_level="warning",
            lifespan="on",
            http=Protocol,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listening],), name="api")
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=30)
        assert not self._thread.is_alive(), "the server did not stop"


class ProcessServer(ApiServer):
    """Server in a separate process, which can be killed and restarted on the same port."""

    def start(self) -> None:
        self.process = programs.start("tests.api_program", [str(self.port)], self.settings.child_environment())

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.wait(timeout=30)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.kill()
