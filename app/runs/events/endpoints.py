"""Endpoints of event streams: of one run, and of all runs."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import select

from anneal.contracts.events import EVENT_TYPES, FEED_TYPES
from anneal.contracts.run_status import TERMINAL
from app.api.errors import not_found
from app.runs.events import feed, responses
from app.runs.events.frames import Batch, truncation_frames
from app.runs.events.sources import FeedSource, RunSource
from app.runs.events.stream import Streams
from app.tables.runs import Run

router = APIRouter(tags=["events"])

_EXAMPLE = (
    "retry: 2000\nid: 41\nevent: metric\n"
    'data: {"run_id":"run_01k3x9m6q2v8s4t0w7y5z1a3b6","seq":41,"ts":"2026-01-02T03:04:05.678Z","step":10,'
    '"epoch":0.5,"loss":2.31,"learning_rate":0.0002,"grad_norm":0.9,"gpu_memory_mb":null,'
    '"samples_per_second":12.5,"extra":{}}\n\n'
)


_CONTENT: dict[str, Any] = {
    "text/event-stream": {"schema": responses.EVENTS_SCHEMA, "example": _EXAMPLE},
    "application/x-ndjson": {"schema": responses.LINES_SCHEMA},
}

Format = Annotated[Literal["sse", "ndjson"], Query(description="`ndjson`: one JSON object per line.")]
Follow = Annotated[bool, Query(description="If false, end after the newest event instead of waiting for more.")]


Ticket = Annotated[
    str | None,
    Query(
        max_length=200,
        description="Ticket of POST /v1/stream-tickets in the place of a key, for an EventSource on another origin. "
        "Authentication has verified it.",
    ),
]


@router.get(
    "/runs/{run_id}/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Stored events after the cursor, then live ones, until the run ends.",
            "content": _CONTENT,
        },
        204: {"description": "The run has ended and the cursor is at or after its `end`: no more events follow."},
    },
)
async def stream_events(
    request: Request,
    run_id: str,
    after: Annotated[int, Query(ge=0, le=2**62, description="Return events after this `seq`.")] = 0,
    types: Annotated[
        str | None,
        Query(
            max_length=200,
            description="Return only these types, comma-separated; `end` and `truncated` are always included.",
        ),
    ] = None,
    follow: Follow = True,
    format: Format = "sse",
    last_event_id: responses.LastEventId = None,
    ticket: Ticket = None,
) -> Response:
    """Stream the events of a run (logs, metrics, status, checkpoints) in order and without gaps, from any cursor."""
    sent = responses.parse_cursor(last_event_id)
    cursor = after if sent is None else sent
    chosen = responses.chosen_types(types, EVENT_TYPES, always=("end", "truncated"))
    # Streams can last for days: the run is read before the first byte is sent, and no session stays open.
    async with request.app.state.sessions() as session:
        run = (
            await session.execute(select(Run.status, Run.event_seq, Run.first_seq).where(Run.id == run_id))
        ).one_or_none()
    if run is None:
        raise not_found("run", run_id)
    if over := responses.ended_response(run.status, run.event_seq, cursor):
        return over
    streams: Streams = request.app.state.streams
    batches = streams.stream_batches(
        RunSource(run_id),
        # A cursor ahead of the log (of another run, or from before a database restore) counts as the end of the log.
        max(min(cursor, run.event_seq), run.first_seq - 1),
        until=None if follow and run.status not in TERMINAL else run.event_seq,
        is_selected=None if chosen is None else lambda frame: frame.type in chosen,
        still_allowed=lambda: responses.still_allowed(request),
    )
    return _stream_response(request, format, batches, truncation_frames(run_id, run, cursor))


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"description": "Stored events after the cursor, then live ones.", "content": _CONTENT}},
)
async def stream_all_events(
    request: Request,
    after: Annotated[
        int | None,
        Query(
            ge=0,
            le=2**62,
            description="Return events after this `cursor`; 0 starts with the oldest. By default the stream starts "
            "now, with a `cursor` event.",
        ),
    ] = None,
    types: Annotated[
        str | None,
        Query(
            max_length=200,
            description=f"Return only these types, comma-separated: {', '.join(FEED_TYPES)}. `truncated` is always "
            "included.",
        ),
    ] = None,
    follow: Follow = True,
    format: Format = "sse",
    last_event_id: responses.LastEventId = None,
    ticket: Ticket = None,
) -> Response:
    """Stream status changes, progress and ends of all runs in one order and without gaps, from any cursor.

    Events arrive about a second after they were stored. Those of deleted runs are left out; `truncated` stands in the
    place of those that were pruned.
    """
    sent = responses.parse_cursor(last_event_id)
    cursor = after if sent is None else sent
    chosen = responses.chosen_types(types, FEED_TYPES, always=("truncated",))
    async with request.app.state.sessions() as session:
        newest = await session.scalar(feed.NEWEST) or 0
    source, streams = FeedSource(), request.app.state.streams
    start = newest if cursor is None else min(cursor, newest)
    batches = streams.stream_batches(
        source,
        start,
        until=None if follow else newest,
        is_selected=None if chosen is None else lambda frame: frame.type in chosen,
        still_allowed=lambda: responses.still_allowed(request),
    )
    return _stream_response(request, format, batches, Batch([source.cursor_frame(start)] if cursor is None else []))


def _stream_response(
    request: Request, format: Literal["sse", "ndjson"], batches: responses.Batches, opening: Batch
) -> Response:
    if format == "ndjson":
        return responses.StreamResponse(request, responses.as_ndjson(batches, opening.lines), "application/x-ndjson")
    return responses.StreamResponse(request, responses.as_sse(batches, opening.sse))
