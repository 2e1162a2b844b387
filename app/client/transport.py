"""How calls travel: two small transports over httpx, and the one set of rules for trying again."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import BaseModel, ValidationError

from app.client.errors import AnnealError, in_words, of_answer

T = TypeVar("T", bound=BaseModel)
R = TypeVar("R")

_TIMEOUT = httpx.Timeout(10.0, read=60.0, write=60.0)
_SHORTEST_SECONDS = 0.25
_LONGEST_SECONDS = 10.0


class Backoff:
    """How long to wait before the next try: longer each time, and never as long as everybody else."""

    def __init__(self) -> None:
        self._tries = 0

    def next(self, asked_for: float | None = None) -> float:
        """Seconds; at least what the service has asked for."""
        most = min(_LONGEST_SECONDS, _SHORTEST_SECONDS * 2.0**self._tries)
        self._tries += 1
        return max(most * random.uniform(0.5, 1.0), asked_for or 0.0)

    def reset(self) -> None:
        """It works again."""
        self._tries = 0


class Transport(Protocol):
    """What both transports do; errors of the connection come as `AnnealError`."""

    url: str

    def build(self, method: str, path: str, **options: Any) -> httpx.Request: ...
    async def send(self, request: httpx.Request) -> httpx.Response: ...
    async def read(self, response: httpx.Response) -> bytes: ...
    def chunks(self, response: httpx.Response) -> AsyncGenerator[bytes]: ...
    def sse(self, response: httpx.Response) -> AsyncGenerator[ServerSentEvent]: ...
    async def release(self, response: httpx.Response) -> None: ...
    async def pause(self, seconds: float) -> None: ...


class SyncTransport:
    """Nothing here waits for an event loop: every coroutine is done when it is first run."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.http = httpx.Client(**_options(url, key))

    def build(self, method: str, path: str, **options: Any) -> httpx.Request:
        return self.http.build_request(method, path, **options)

    async def send(self, request: httpx.Request) -> httpx.Response:
        with in_words(self.url):
            return self.http.send(request, stream=True)

    async def read(self, response: httpx.Response) -> bytes:
        with in_words(self.url):
            return response.read()

    async def chunks(self, response: httpx.Response) -> AsyncGenerator[bytes]:
        with in_words(self.url):
            for chunk in response.iter_bytes():
                yield chunk

    async def sse(self, response: httpx.Response) -> AsyncGenerator[ServerSentEvent]:
        with in_words(self.url):
            for event in EventSource(response).iter_sse():
                yield event

    async def release(self, response: httpx.Response) -> None:
        response.close()

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop


class AsyncTransport:
    """The same on an event loop."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.http = httpx.AsyncClient(**_options(url, key))

    def build(self, method: str, path: str, **options: Any) -> httpx.Request:
        return self.http.build_request(method, path, **options)

    async def send(self, request: httpx.Request) -> httpx.Response:
        with in_words(self.url):
            return await self.http.send(request, stream=True)

    async def read(self, response: httpx.Response) -> bytes:
        with in_words(self.url):
            return await response.aread()

    async def chunks(self, response: httpx.Response) -> AsyncGenerator[bytes]:
        with in_words(self.url):
            async for chunk in response.aiter_bytes():
                yield chunk

    async def sse(self, response: httpx.Response) -> AsyncGenerator[ServerSentEvent]:
        with in_words(self.url):
            async with aclosing(EventSource(response).aiter_sse()) as events:
                async for event in events:
                    yield event

    async def release(self, response: httpx.Response) -> None:
        await response.aclose()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Session:
    """Sends requests, again where that is safe, and reads the answers."""

    def __init__(self, transport: Transport, patience: float) -> None:
        self.transport = transport
        self.patience = patience

    async def get(self, model: type[T], path: str, **params: Any) -> T:
        """GET, answered with a `model`; parameters that are None are left out."""
        return understood(model, await self.request("GET", path, params=_given(params)))

    async def post(
        self, model: type[T], path: str, body: Mapping[str, Any], *, key: str | None = None, repeatable: bool = False
    ) -> T:
        """POST of JSON, answered with a `model`; with an idempotency key it can be repeated."""
        headers = {} if key is None else {"Idempotency-Key": key}
        repeatable = repeatable or key is not None
        return understood(model, await self.request("POST", path, repeatable=repeatable, json=body, headers=headers))

    async def request(self, method: str, path: str, *, repeatable: bool = False, **options: Any) -> bytes:
        """The body of the answer to any request."""
        request = self.transport.build(method, path, **options)
        return await self.fetch(request, repeatable=repeatable or method == "GET")

    async def fetch(self, request: httpx.Request, *, repeatable: bool) -> bytes:
        """The body of a successful answer; one that breaks off counts as a try like any other."""
        return await self._try(self._whole, request, repeatable)

    async def send(self, request: httpx.Request, *, repeatable: bool) -> httpx.Response:
        """A successful answer, not read yet."""
        return await self._try(self.attempt, request, repeatable)

    async def _try(self, once: Callable[[httpx.Request], Awaitable[R]], request: httpx.Request, repeatable: bool) -> R:
        """As many tries as fit into the client's patience, which begins with the first that fails: a call may be long.

        A request that cannot be repeated is sent again only when the service was not even reached.
        """
        failing_since: float | None = None
        backoff = Backoff()
        while True:
            try:
                return await once(request)
            except AnnealError as error:
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                wait = backoff.next(error.retry_after)
                may_repeat = (error.is_passing and repeatable) or error.code == "unreachable"
                if not may_repeat or now + wait - failing_since > self.patience:
                    raise
            await self.transport.pause(wait)

    async def _whole(self, request: httpx.Request) -> bytes:
        response = await self.attempt(request)
        try:
            return await self.transport.read(response)
        finally:
            await self.transport.release(response)

    async def attempt(self, request: httpx.Request) -> httpx.Response:
        """One try: an answer below 400, not read yet."""
        response = await self.transport.send(request)
        if response.status_code < 400:
            return response
        try:
            await self.transport.read(response)
        finally:
            await self.transport.release(response)
        raise of_answer(response)


def understood(model: type[T], content: bytes) -> T:
    """What the service has answered, as a `model`."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise AnnealError(
            "unexpected_answer",
            f"The answer is not what this version understands ({f'{where}: ' if where else ''}{first['msg']}): see "
            "that ANNEAL_URL names an Anneal service, and that its version is not older or far newer than this one.",
        ) from None


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None and value != ()}


def _options(url: str, key: str) -> dict[str, Any]:
    host = httpx.URL(url).host
    return {
        "base_url": f"{url}/v1",
        "headers": {"Authorization": f"Bearer {key}"},
        "timeout": _TIMEOUT,
        # A proxy is for other machines; and reading the certificates takes longer than most calls.
        "trust_env": host not in ("127.0.0.1", "localhost", "::1"),
        "verify": url.startswith("https"),
    }
