"""HTTP responses for the streams of a run: cursors, formats, and disconnection."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Header, Request, Response
from sse_starlette import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from anneal.contracts.errors import FieldError
from anneal.contracts.events import EVENTS
from anneal.contracts.run_status import TERMINAL
from app.api.errors import ApiError
from app.api.open_responses import OpenResponses
from app.infra import async_tasks
from app.runs.events import stream
from app.runs.events.frames import Batch

log = logging.getLogger(__name__)

Batches = AsyncIterator[tuple[int, Batch]]
EVENTS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "One event of the stream.",
    "properties": {
        "id": {"type": "string", "description": "Cursor from which to continue: the event's `seq`."},
        "event": {"type": "string", "enum": list(EVENTS)},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "description": "A JSON object on one line: the fields of the type's model ("
            + ", ".join(model.__name__ for model in EVENTS.values())
            + ") except `type`.",
        },
        "retry": {"type": "integer", "description": "Milliseconds to wait before a reconnect."},
    },
}
"""Schema of a `text/event-stream` item, for /openapi.json."""
LINES_SCHEMA: dict[str, Any] = {
    "description": "One event; the body has one per line.",
    "oneOf": [{"$ref": f"#/components/schemas/{model.__name__}"} for model in EVENTS.values()],
    "discriminator": {
        "propertyName": "type",
        "mapping": {kind: f"#/components/schemas/{model.__name__}" for kind, model in EVENTS.items()},
    },
}
"""Schema of an `application/x-ndjson` line; `app.api.openapi` adds the models to the document."""

LastEventId = Annotated[
    str | None, Header(description="Cursor that an EventSource sends on reconnect; takes precedence over `after`.")
]

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
SEND_SECONDS = 60.0
"""A client that reads nothing for this long is disconnected; it can continue from its cursor."""
_CUT_SECONDS = 5.0
_LAST_SECONDS = 1.0
"""Time that a slow reader has to receive the end of its stream when this process shuts down."""


def parse_cursor(last_event_id: str | None) -> int | None:
    """Parse the cursor that a reconnecting client sends; raise ApiError 422 if it is not a valid id."""
    if not last_event_id:
        return None
    if not last_event_id.isascii() or not last_event_id.isdigit() or len(last_event_id) > 18:
        message = "Last-Event-ID must be the id of an event of this stream, an integer"
        raise ApiError(
            422, "invalid", message, errors=[FieldError(field="Last-Event-ID", code="invalid", message=message)]
        )
    return int(last_event_id)


def ended_response(status: str, event_seq: int, after: int) -> Response | None:
    """Return 204 if the run has ended and the reader has seen everything, so that an EventSource stops reconnecting."""
    if status in TERMINAL and after >= event_seq:
        return Response(status_code=204, headers=HEADERS)
    return None


class OpenStreams(OpenResponses):
    """Number of open streams of each key."""

    def _too_many_error(self, limit: int, headers: dict[str, str]) -> ApiError:
        return ApiError(
            429,
            "too_many_streams",
            f"This key has {limit:,} open streams, which is the limit (ANNEAL_STREAMS_PER_KEY); close some, "
            "or use another key.",
            headers=headers,
        )


class StreamResponse(EventSourceResponse):
    """Long-lived streaming response; disconnected when its client stops reading or loses access.

    Counts as one of its key's open streams; called when there are too many, it raises ApiError 429.
    """

    def __init__(
        self, request: Request, body: AsyncIterator[bytes], media_type: str = "text/event-stream", cut: bytes = b""
    ) -> None:
        """Stream `body`; if the server shuts down before its end, `cut` is sent last."""
        # A ping of EventSourceResponse is a block of its own; the keep-alive of `as_sse` is not.
        super().__init__(body, headers=HEADERS, media_type=media_type, ping=0)
        self._request = request
        self._cut = cut
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_streams: OpenStreams = self._request.app.state.open_streams
        with open_streams.count_open(self._request.state.caller.key_id):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = False

        async def send_timed(message: Message) -> None:
            nonlocal is_open
            is_open = message["type"] == "http.response.start" or bool(message.get("more_body"))
            self._sending_since = time.monotonic()
            await send(message)
            self._sending_since = None

        serving = asyncio.create_task(super().__call__(scope, receive, send_timed), name="serve a stream")
        watching = asyncio.create_task(self._watch_client(serving), name="watch a stream")
        try:
            await asyncio.wait([serving])
        finally:
            await async_tasks.cancel_and_wait(watching)
            await async_tasks.cancel_and_wait(serving)
        if serving.cancelled():
            return
        if problem := serving.exception():
            raise problem
        if is_open:
            # The server is shutting down. Frames are sent whole, so the body can end here. Without this message the
            # client would see a broken connection.
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS):
                    await send({"type": "http.response.body", "body": self._cut, "more_body": False})

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # A timeout around each send costs half as much as the send itself; `_watch_client` checks all of them.
        await send(message)

    async def _watch_client(self, serving: asyncio.Task[None]) -> None:
        """Cancel the stream when its client stops reading or loses access.

        Runs on a timer: the stream also checks access, but not while a send is blocked.
        """
        checked = time.monotonic()
        while True:
            await asyncio.sleep(min(stream.RECHECK_SECONDS, SEND_SECONDS))
            now = time.monotonic()
            if self._sending_since is not None and now - self._sending_since >= SEND_SECONDS:
                log.info("stream disconnected: its client read nothing for %.0f s", SEND_SECONDS)
                break
            if now - checked >= stream.RECHECK_SECONDS:
                checked = now
                if not await still_allowed(self._request):
                    await asyncio.sleep(_CUT_SECONDS)  # the stream normally ends itself in this time
                    log.info("stream disconnected: its API key is no longer valid")
                    break
        serving.cancel()


async def still_allowed(request: Request) -> bool:
    """Return True if the caller of a stream may continue reading."""
    allowed: bool = await request.app.state.auth.still_valid(request.state.caller.key_id)
    return allowed


async def as_sse(batches: Batches, opening: bytes = b"") -> AsyncIterator[bytes]:
    """Encode batches as `text/event-stream`.

    Clients disagree on a block without data: some dispatch it as an event. So `retry` is a line of the first event's
    block, and a keep-alive is a comment line without a block of its own.
    """
    yield b"retry: 2000\n" + opening
    async for _, frames in batches:
        yield frames.sse if frames else b": keep-alive\n"


async def as_ndjson(batches: Batches, opening: bytes = b"") -> AsyncIterator[bytes]:
    """Encode batches as lines of JSON."""
    if opening:
        yield opening
    async for _, frames in batches:
        if frames:
            yield frames.lines


def chosen_types(text: str | None, valid: Sequence[str], always: Sequence[str] = ()) -> frozenset[str] | None:
    """Return the event types that a parameter names, and those that always come; None without the parameter.

    Raises 422 for types that are not `valid`.
    """
    if text is None:
        return None
    selected = frozenset(part.strip() for part in text.split(",") if part.strip())
    unknown = sorted(selected - set(valid))
    if unknown or not selected:
        message = f"unknown event types {', '.join(unknown) or '(none)'}; valid types: {', '.join(valid)}"
        raise ApiError(422, "invalid", message, errors=[FieldError(field="types", code="unknown", message=message)])
    return selected | frozenset(always)
