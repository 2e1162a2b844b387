"""A site on another origin: the example page of the documentation, and a server that creates tickets for it."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

from tests.server import ApiServer

_GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "dashboard.md"
_API = "https://anneal.example.com"


def example_page(api_url: str) -> str:
    """Return the page of the guide, for the service at this address."""
    (page,) = re.findall(r"```html\n(.*?)```", _GUIDE.read_text(), re.DOTALL)
    assert _API in page
    return str(page).replace(_API, api_url)


class ForeignSite:
    """Serves the example page at `/?run=…`, its tickets at `/ticket?run=…`, and an empty page at `/empty`."""

    def __init__(self) -> None:
        self._api: ApiServer | None = None
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, media_type = site._answer(self.path)
                self.send_response(200)
                self.send_header("Content-Type", media_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *values: object) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.origin = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="foreign site")

    def serve(self, api: ApiServer) -> None:
        """Show the runs of this service; it may have been started after the address of the site was known."""
        self._api = api

    def _answer(self, address: str) -> tuple[bytes, str]:
        url = urlsplit(address)
        if self._api is None or url.path in ("/empty", "/favicon.ico"):
            return b"<!doctype html><title>Empty</title><link rel=icon href=data:,>", "text/html"
        if url.path == "/ticket":
            run = parse_qs(url.query)["run"][0]
            ticket = self._api.client.post("/v1/stream-tickets", json={"run_id": run})
            return ticket.content, "application/json"
        return example_page(self._api.url).encode(), "text/html"

    def __enter__(self) -> "ForeignSite":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=30)
