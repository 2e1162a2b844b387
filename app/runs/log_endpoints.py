"""`GET /v1/runs/{id}/logs`."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from sse_starlette import EventSourceResponse

from app.auth import CurrentCaller
from app.events.stream import Streams
from app.runs import logs, service

router = APIRouter(prefix="/runs", tags=["runs"])

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}


@router.get(
    "/{run_id}/logs",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Lines, or `log` events when `Accept` asks for `text/event-stream`.",
            "content": {
                "text/plain": {"schema": {"type": "string"}, "example": "step 10 loss 2.31\n"},
                "text/event-stream": {"schema": {"type": "string"}},
            },
        }
    },
)
async def get_logs(
    request: Request,
    run_id: str,
    caller: CurrentCaller,
    tail: Annotated[int | None, Query(ge=0, le=1_000_000, description="Only the last lines.")] = None,
    follow: Annotated[bool, Query(description="Wait for more until the run ends.")] = False,
    grep: Annotated[str | None, Query(max_length=1000, description="Only lines with this text.")] = None,
) -> Response:
    """What the training process printed."""
    # A stream may last for days: its look at the run is over before the first byte, no session stays open.
    async with request.app.state.sessions() as session:
        run = await service.get(session, run_id)
        after = await logs.cursor(session, run, tail, grep)
    streams: Streams = request.app.state.streams

    async def still_allowed() -> bool:
        allowed: bool = await request.app.state.auth.still_valid(caller.key_id)
        return allowed

    until = None if follow else run.event_seq
    batches = streams.batches(run_id, after, until=until, still_allowed=still_allowed)
    if "text/event-stream" in request.headers.get("accept", ""):
        return EventSourceResponse(logs.as_sse(batches, grep), headers=_HEADERS, ping=3600 * 24, send_timeout=60)
    return StreamingResponse(logs.as_text(batches, grep), media_type="text/plain; charset=utf-8", headers=_HEADERS)
