"""Sync and async transports over httpx, and the retry rules shared by both."""

import asyncio
import random
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import BaseModel, ValidationError

from anneal.client.connection import Connection
from anneal.client.errors import AnnealError, convert_errors, from_response
from anneal.settings import proxy_of

T = TypeVar("T", bound=BaseModel)
R = TypeVar("R")

OnRetry = Callable[[AnnealError], None]
"""Called with each failure after which the call is tried again."""

_TIMEOUT = httpx.Timeout(10.0, read=60.0, write=60.0)
_SHORTEST_SECONDS = 0.25
_LONGEST_SECONDS = 10.0


class Backoff:
    """Exponential backoff with jitter between retries."""

    def __init__(self) -> None:
        self._tries = 0

    def next_delay(self, asked_for: float | None = None) -> float:
        """Return the next delay in seconds; at least the `Retry-After` of the service."""
        most = min(_LONGEST_SECONDS, _SHORTEST_SECONDS * 2.0**self._tries)
        self._tries += 1
        return max(most * random.uniform(0.5, 1.0), asked_for or 0.0)

    def reset(self) -> None:
        """Restart from the shortest delay after a success."""
        self._tries = 0


class Transport(Protocol):
    """Interface of both transports; connection errors are raised as `AnnealError`."""

    url: str

    def build_request(self, method: str, path: str, **options: Any) -> httpx.Request: ...
    async def send_request(self, request: httpx.Request) -> httpx.Response: ...
    async def read_body(self, response: httpx.Response) -> bytes: ...
    def iterate_chunks(self, response: httpx.Response) -> AsyncGenerator[bytes]: ...
    def iterate_sse(self, response: httpx.Response) -> AsyncGenerator[ServerSentEvent]: ...
    async def close_response(self, response: httpx.Response) -> None: ...
    async def pause(self, seconds: float) -> None: ...


class SyncTransport:
    """Blocking transport: its coroutines never suspend, so no event loop is needed."""

    def __init__(self, connection: Connection) -> None:
        self.url = connection.url
        self.http = httpx.Client(**_http_options(connection))

    def build_request(self, method: str, path: str, **options: Any) -> httpx.Request:
        return self.http.build_request(method, path, **options)

    async def send_request(self, request: httpx.Request) -> httpx.Response:
        with convert_errors(self.url):
            return self.http.send(request, stream=True)

    async def read_body(self, response: httpx.Response) -> bytes:
        with convert_errors(self.url):
            return response.read()

    async def iterate_chunks(self, response: httpx.Response) -> AsyncGenerator[bytes]:
        with convert_errors(self.url):
            for chunk in response.iter_bytes():
                yield chunk

    async def iterate_sse(self, response: httpx.Response) -> AsyncGenerator[ServerSentEvent]:
        with convert_errors(self.url):
            for event in EventSource(response).iter_sse():
                yield event

    async def close_response(self, response: httpx.Response) -> None:
        response.close()

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop


class AsyncTransport:
    """Transport for an event loop."""

    def __init__(self, connection: Connection) -> None:
        self.url = connection.url
        self.http = httpx.AsyncClient(**_http_options(connection))

    def build_request(self, method: str, path: str, **options: Any) -> httpx.Request:
        return self.http.build_request(method, path, **options)

    async def send_request(self, request: httpx.Request) -> httpx.Response:
        with convert_errors(self.url):
            return await self.http.send(request, stream=True)

    async def read_body(self, response: httpx.Response) -> bytes:
        with convert_errors(self.url):
            return await response.aread()

    async def iterate_chunks(self, response: httpx.Response) -> AsyncGenerator[bytes]:
        with convert_errors(self.url):
            async for chunk in response.aiter_bytes():
                yield chunk

    async def iterate_sse(self, response: httpx.Response) -> AsyncGenerator[ServerSentEvent]:
        with convert_errors(self.url):
            async with aclosing(EventSource(response).aiter_sse()) as events:
                async for event in events:
                    yield event

    async def close_response(self, response: httpx.Response) -> None:
        await response.aclose()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Session:
    """Sends requests, retries them where that is safe, and reads the responses."""

    def __init__(self, transport: Transport, patience: float, on_retry: OnRetry | None = None) -> None:
        self.transport = transport
        self.patience = patience
        self._on_retry = on_retry

    async def get(self, model: type[T], path: str, **params: Any) -> T:
        """Send a GET request and parse the response as `model`; parameters that are None are omitted."""
        return parse_response(model, await self.request("GET", path, params=_without_unset(params)))

    async def post(
        self, model: type[T], path: str, body: Mapping[str, Any], *, key: str | None = None, repeatable: bool = False
    ) -> T:
        """Send a POST request with JSON and parse the response as `model`; with an idempotency key it is retried."""
        headers = {} if key is None else {"Idempotency-Key": key}
        repeatable = repeatable or key is not None
        return parse_response(
            model, await self.request("POST", path, repeatable=repeatable, json=body, headers=headers)
        )

    async def request(self, method: str, path: str, *, repeatable: bool = False, **options: Any) -> bytes:
        """Send a request and return the body of the response."""
        request = self.transport.build_request(method, path, **options)
        return await self.fetch_body(request, repeatable=repeatable or method == "GET")

    async def fetch_body(self, request: httpx.Request, *, repeatable: bool) -> bytes:
        """Return the body of a successful response; an interrupted body is retried like any failure."""
        return await self._retry_failures(self._attempt_whole, request, repeatable)

    async def send_repeatedly(self, request: httpx.Request, *, repeatable: bool) -> httpx.Response:
        """Return a successful response whose body has not been read."""
        return await self._retry_failures(self.attempt_once, request, repeatable)

    async def _retry_failures(
        self, once: Callable[[httpx.Request], Awaitable[R]], request: httpx.Request, repeatable: bool
    ) -> R:
        """Retry for up to `patience` seconds after the first failure, because the call itself may take long.

        A request that is not repeatable is sent again only if the service was not reached.
        """
        failing_since: float | None = None
        backoff = Backoff()
        while True:
            try:
                return await once(request)
            except AnnealError as error:
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                wait = backoff.next_delay(error.retry_after)
                may_repeat = (error.is_transient and repeatable) or error.code == "unreachable"
                if not may_repeat or now + wait - failing_since > self.patience:
                    raise
                if self._on_retry is not None:
                    self._on_retry(error)
            await self.transport.pause(wait)

    async def _attempt_whole(self, request: httpx.Request) -> bytes:
        response = await self.attempt_once(request)
        try:
            return await self.transport.read_body(response)
        finally:
            await self.transport.close_response(response)

    async def attempt_once(self, request: httpx.Request) -> httpx.Response:
        """Send once and return a response with status below 400, not read yet; raise the error otherwise."""
        response = await self.transport.send_request(request)
        if response.status_code < 400:
            return response
        try:
            await self.transport.read_body(response)
        finally:
            await self.transport.close_response(response)
        raise from_response(response)


def parse_response(model: type[T], content: bytes) -> T:
    """Parse a response body as `model`."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise AnnealError(
            "unexpected_answer",
            f"The response is not in the expected format ({f'{where}: ' if where else ''}{first['msg']}): check that "
            "ANNEAL_URL is the URL of an Anneal service whose version is not older or much newer than this client.",
        ) from None


def _without_unset(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None and value != ()}


def _http_options(connection: Connection) -> dict[str, Any]:
    url = connection.url
    host = httpx.URL(url).host
    return {
        "base_url": f"{url}/v1",
        "auth": connection.authorize,
        "timeout": _TIMEOUT,
        "trust_env": False,  # httpx fails on networks in NO_PROXY
        "proxy": None if host in ("127.0.0.1", "localhost", "::1") else _proxy_for(url),
        # Without TLS, skip loading certificates: it takes longer than most calls.
        "verify": _tls_context(connection.ca_file) if url.startswith("https") else False,
    }


def _proxy_for(url: str) -> httpx.Proxy | None:
    if (proxy := proxy_of(url)) is None:
        return None
    try:
        return httpx.Proxy(proxy)
    except (ValueError, httpx.InvalidURL) as error:
        raise AnnealError(
            "invalid_setting",
            f"The proxy in the environment cannot be used ({error}): set HTTP_PROXY and HTTPS_PROXY to "
            "http://host:port, or NO_PROXY to the host of the service.",
        ) from None


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return the certificates that servers are verified with: of `ca_file`, else of the environment or certifi."""
    try:
        return ssl.create_default_context(cafile=ca_file) if ca_file else httpx.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise AnnealError(
            "invalid_setting",
            f"{ca_file or 'SSL_CERT_FILE'} has no certificates that can be read ({error.strerror or error}): name a "
            "file with the certificate of the authority in PEM format (ANNEAL_CA_FILE or --ca-file).",
        ) from None
