"""Endpoint of `GET /v1/runs/{id}/logs`."""

import asyncio
from contextlib import nullcontext
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from app.api.dependencies import Reading
from app.api.errors import invalid
from app.contracts.errors import FieldError
from app.contracts.run_status import TERMINAL
from app.contracts.schemas.logs import LogHits, LogLevel, LogLines, LogStream
from app.runs import service
from app.runs.events import responses
from app.runs.events.sources import RunSource
from app.runs.events.stream import Streams
from app.runs.logs import lines, window

router = APIRouter(prefix="/runs", tags=["runs"])


SEARCHES_AT_A_TIME = 2
"""Concurrent searches from the end of a log, which may read every line of it; others wait without a connection."""


def _log_searches(request: Request) -> asyncio.Semaphore:
    log_searches: asyncio.Semaphore = request.app.state.log_searches
    return log_searches


@router.get(
    "/{run_id}/logs",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Lines, or `log` events if `Accept` contains `text/event-stream`.",
            "content": {
                "text/plain": {"schema": {"type": "string"}, "example": "step 10 loss 2.31\n"},
                "text/event-stream": {"schema": responses.EVENTS_SCHEMA},
            },
        },
        204: {"description": "For events: the run has ended and the cursor is past its `end`."},
    },
)
async def get_logs(
    request: Request,
    run_id: str,
    tail: Annotated[int | None, Query(ge=0, le=1_000_000, description="Return only this many last lines.")] = None,
    follow: Annotated[bool, Query(description="Stream further lines until the run ends.")] = False,
    grep: Annotated[str | None, Query(max_length=1000, description="Return only lines that contain this text.")] = None,
    last_event_id: responses.LastEventId = None,
) -> Response:
    """Get the output of the training process."""
    as_events = "text/event-stream" in request.headers.get("accept", "")
    sent = responses.cursor(last_event_id) if as_events else None
    # A stream may last for days: the session is closed before the first byte.
    async with _log_searches(request) if tail and grep else nullcontext(), request.app.state.sessions() as session:
        run = await service.get(session, run_id)
        after = (
            await lines.cursor(session, run, tail, grep)
            if sent is None
            else max(min(sent, run.event_seq), run.first_seq - 1)
        )
    if as_events and (over := responses.ended_response(run.status, run.event_seq, after)):
        return over
    streams: Streams = request.app.state.streams
    batches = streams.batches(
        RunSource(run_id),
        after,
        until=None if follow and run.status not in TERMINAL else run.event_seq,
        wanted=(lambda frame: lines.is_shown(frame, grep)) if as_events else None,
        still_allowed=lambda: responses.still_allowed(request),
    )
    if as_events:
        return responses.StreamResponse(request, responses.as_sse(batches))
    return responses.StreamResponse(request, lines.as_text(batches, grep), "text/plain; charset=utf-8")


Level = Annotated[LogLevel | None, Query(description="Only lines of this level; `warning` includes errors.")]
Stream = Annotated[LogStream | None, Query(description="Only lines of this stream.")]
OfAttempt = Annotated[int | None, Query(ge=1, le=2**31 - 1, description="Only lines of this attempt.")]
Seq = Annotated[int | None, Query(ge=0, le=2**62)]


@router.get("/{run_id}/logs/lines")
async def get_log_lines(
    run_id: str,
    session: Reading,
    before: Seq = None,
    after: Seq = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    level: Level = None,
    stream: Stream = None,
    attempt: OfAttempt = None,
) -> LogLines:
    """Get a part of the log as JSON: the newest lines, those before a `seq`, or those after one."""
    if before is not None and after is not None:
        message = "name either `before` or `after`"
        raise invalid([FieldError(field="after", code="conflict", message=message)])
    run = await service.get(session, run_id)
    where = window.conditions(level, stream, attempt)
    found, has_more = await window.lines(session, run.id, before=before, after=after, limit=limit, where=where)
    return LogLines(data=found, has_more=has_more)


@router.get("/{run_id}/logs/search")
async def search_log(
    request: Request,
    run_id: str,
    q: Annotated[
        str,
        Query(min_length=1, max_length=1000, description="Text; upper and lower case differ.", examples=["loss nan"]),
    ],
    before: Seq = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    level: Level = None,
    stream: Stream = None,
    attempt: OfAttempt = None,
) -> LogHits:
    """Find the lines of the whole log that contain a text; GET …/logs/lines returns them."""
    async with _log_searches(request), request.app.state.reading_sessions() as session:
        run = await service.get(session, run_id)
        where = window.conditions(level, stream, attempt)
        found, has_more = await window.hits(session, run.id, q, before=before, limit=limit, where=where)
    return LogHits(data=found, has_more=has_more)
