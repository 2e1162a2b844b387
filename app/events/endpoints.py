"""`GET /v1/runs/{id}/events`: the event stream of a run."""

from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import select
from sse_starlette import EventSourceResponse

from app.errors import ApiError, FieldError, not_found
from app.events.stream import Frame, Streams
from app.runs.models import TERMINAL, Run

router = APIRouter(tags=["events"])

EVENT_TYPES = (
    "status", "log", "metric", "eval", "checkpoint", "config", "progress", "sample", "error", "end",
)  # fmt: skip
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_RETRY = b"retry: 2000\n\n"
_EXAMPLE = (
    "retry: 2000\n\nid: 41\nevent: metric\n"
    'data: {"run_id":"run_01k3x9m6q2v8s4t0w7y5z1a3b6","seq":41,"ts":"2026-01-02T03:04:05.678Z","step":10,'
    '"epoch":0.5,"loss":2.31,"learning_rate":0.0002,"grad_norm":0.9,"gpu_memory_mb":null,'
    '"samples_per_second":12.5,"extra":{}}\n\n'
)


@router.get(
    "/runs/{run_id}/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Stored events behind the cursor, then live ones, until the run ends.",
            "content": {
                "text/event-stream": {"schema": {"type": "string"}, "example": _EXAMPLE},
                "application/x-ndjson": {"schema": {"type": "string"}},
            },
        },
        204: {"description": "The run has ended and the cursor is behind its `end`: nothing will ever come."},
    },
)
async def stream_events(
    request: Request,
    run_id: str,
    after: Annotated[int, Query(ge=0, le=2**62, description="Continue behind this `seq`.")] = 0,
    types: Annotated[
        str | None,
        Query(max_length=200, description="Only these event types, comma-separated; `end` always comes."),
    ] = None,
    follow: Annotated[bool, Query(description="False: end at the newest event instead of waiting.")] = True,
    format: Annotated[Literal["sse", "ndjson"], Query(description="`ndjson`: one JSON object a line.")] = "sse",
    last_event_id: Annotated[
        str | None, Header(description="What an EventSource sends on reconnect; wins over `after`.")
    ] = None,
) -> Response:
    """Follow a run: logs, metrics, status and checkpoints in one order, from any cursor, without a gap."""
    cursor = _cursor(last_event_id, after)
    wanted = _types(types)
    # Streams live for days: the look at the run is over before the first byte, no session stays open.
    async with request.app.state.sessions() as session:
        run = (
            await session.execute(select(Run.status, Run.event_seq, Run.first_seq).where(Run.id == run_id))
        ).one_or_none()
    if run is None:
        raise not_found("run", run_id)
    if run.status in TERMINAL and cursor >= run.event_seq:
        return Response(status_code=204, headers=_HEADERS)
    streams: Streams = request.app.state.streams
    caller = request.state.caller

    async def still_allowed() -> bool:
        allowed: bool = await request.app.state.auth.still_valid(caller.key_id)
        return allowed

    batches = streams.batches(
        run_id,
        max(cursor, run.first_seq - 1),
        until=None if follow else run.event_seq,
        still_allowed=still_allowed,
    )
    truncated = run.first_seq if cursor < run.first_seq - 1 else None
    if format == "ndjson":
        return StreamingResponse(
            _lines(batches, run_id, wanted, truncated), media_type="application/x-ndjson", headers=_HEADERS
        )
    return EventSourceResponse(
        _frames(batches, run_id, wanted, truncated),
        headers=_HEADERS,
        ping=3600 * 24,  # the stream's own keep-alive carries the cursor; this one would not
        send_timeout=60,
    )


def _cursor(last_event_id: str | None, after: int) -> int:
    if not last_event_id:
        return after
    if not last_event_id.isascii() or not last_event_id.isdigit() or len(last_event_id) > 18:
        message = "Last-Event-ID must be the id of an event of this stream, a whole number"
        raise ApiError(
            422, "invalid", message, errors=[FieldError(field="Last-Event-ID", code="invalid", message=message)]
        )
    return int(last_event_id)


def _types(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    wanted = frozenset(part.strip() for part in text.split(",") if part.strip())
    unknown = sorted(wanted - set(EVENT_TYPES))
    if unknown or not wanted:
        message = f"unknown event types {', '.join(unknown) or '(none)'}: choose from {', '.join(EVENT_TYPES)}"
        raise ApiError(422, "invalid", message, errors=[FieldError(field="types", code="unknown", message=message)])
    return wanted | {"end"}


async def _frames(
    batches: AsyncIterator[tuple[int, list[Frame]]],
    run_id: str,
    wanted: frozenset[str] | None,
    truncated: int | None,
) -> AsyncIterator[bytes]:
    yield _RETRY
    if truncated is not None:
        yield b'id: %d\nevent: truncated\ndata: {"run_id":"%s","first_seq":%d}\n\n' % (
            truncated - 1, run_id.encode(), truncated,
        )  # fmt: skip
    async for cursor, frames in batches:
        chosen = [frame for frame in frames if wanted is None or frame.type in wanted]
        if chosen:
            yield b"".join(frame.sse for frame in chosen)
        elif not frames:
            yield b": keep-alive\nid: %d\n\n" % cursor


async def _lines(
    batches: AsyncIterator[tuple[int, list[Frame]]],
    run_id: str,
    wanted: frozenset[str] | None,
    truncated: int | None,
) -> AsyncIterator[bytes]:
    if truncated is not None:
        yield b'{"type":"truncated","run_id":"%s","first_seq":%d}\n' % (run_id.encode(), truncated)
    async for _, frames in batches:
        chosen = [frame for frame in frames if wanted is None or frame.type in wanted]
        if chosen:
            yield b"".join(frame.line for frame in chosen)
