"""Endpoints of `/v1/runs/{id}/logs`."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.run_status import TERMINAL
from anneal.contracts.schemas.logs import CompleteLogHits, LogHits, LogLevel, LogLines, LogStream
from app.api.dependencies import CurrentStorage, Reading, Session, release_connection
from app.api.errors import ApiError, invalid
from app.api.open_responses import DownloadLimit
from app.infra.files.object_store import StoreUnavailable
from app.infra.storage import Storage
from app.runs.events import responses
from app.runs.events.sources import RunSource
from app.runs.events.stream import Streams
from app.runs.reading.logs import complete, lines, window
from app.runs.state import service
from app.runs.state.artifacts.archive import read_in_threads
from app.runs.state.artifacts.folders import FileFolder
from app.runs.state.artifacts.service import attempt_folder

router = APIRouter(prefix="/runs", tags=["runs"])


SEARCHES_AT_A_TIME = 2
"""Concurrent searches from the end of a log, which may read every line of it; others wait without a connection."""

_SEARCHED_ENOUGH = (
    "the logs of later attempts have as much text as a search reads: search this attempt alone (`attempt`)"
)


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
    sent = responses.parse_cursor(last_event_id) if as_events else None
    # A stream may last for days: the session is closed before the first byte.
    async with _log_searches(request) if tail and grep else nullcontext(), request.app.state.sessions() as session:
        run = await service.get_run(session, run_id)
        after = (
            await lines.find_tail_cursor(session, run, tail, grep)
            if sent is None
            else max(min(sent, run.event_seq), run.first_seq - 1)
        )
    if as_events and (over := responses.ended_response(run.status, run.event_seq, after)):
        return over
    streams: Streams = request.app.state.streams
    batches = streams.stream_batches(
        RunSource(run_id),
        after,
        until=None if follow and run.status not in TERMINAL else run.event_seq,
        is_selected=(lambda frame: lines.is_shown(frame, grep)) if as_events else None,
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
    run = await service.get_run(session, run_id)
    where = window.filter_conditions(level, stream, attempt)
    log_lines, has_more = await window.read_lines(session, run.id, before=before, after=after, limit=limit, where=where)
    return LogLines(data=log_lines, has_more=has_more)


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
    """Find the lines of the whole log that contain a text; GET …/logs/lines returns them.

    Where the stream left out lines, the complete log of the attempt is searched as well, unless `before` is given: of
    several attempts the newest first, until as much text was read as an attempt can have.
    """
    storage: Storage = request.app.state.storage
    async with _log_searches(request):
        async with request.app.state.reading_sessions() as session:
            run = await service.get_run(session, run_id)
            where = window.filter_conditions(level, stream, attempt)
            hits, has_more = await window.find_hits(session, run.id, q, before=before, limit=limit, where=where)
            left_out = {} if before is not None else await complete.left_out_lines(session, run.id)
            if attempt is not None:
                left_out = {number: count for number, count in left_out.items() if number == attempt}
            folders = {number: await _folder_or_error(session, storage, run_id, number) for number in left_out}
        logs: list[CompleteLogHits] = []
        text_bytes, lines_left = complete.MOST_SEARCHED_BYTES, complete.MOST_HITS
        for number in sorted(left_out, reverse=True):
            log, searched_bytes = await _search_complete_log(
                storage, run_id, number, left_out[number], folders[number], q, level, stream, text_bytes, lines_left
            )
            logs.append(log)
            text_bytes -= searched_bytes
            lines_left -= len(log.data)
    return LogHits(data=hits, has_more=has_more, complete=logs[::-1])


async def _folder_or_error(session: AsyncSession, storage: Storage, run_id: str, attempt: int) -> FileFolder | ApiError:
    try:
        return await attempt_folder(session, storage, run_id, attempt)
    except ApiError as error:
        return error


async def _search_complete_log(
    storage: Storage,
    run_id: str,
    attempt: int,
    left_out: int,
    folder: FileFolder | ApiError,
    phrase: str,
    level: LogLevel | None,
    stream: LogStream | None,
    most_bytes: int,
    most_lines: int,
) -> tuple[CompleteLogHits, int]:
    """Return the matches in the log of an attempt, and the bytes of text that were searched."""
    path = f"/v1/runs/{run_id}/logs/complete?attempt={attempt}"
    hits = CompleteLogHits(
        attempt=attempt, left_out=left_out, complete_log=path, matches=None, data=[], problem=_SEARCHED_ENOUGH
    )
    if most_bytes <= 0:
        return hits, 0
    try:
        if isinstance(folder, ApiError):
            raise folder
        result = await storage.in_transfer(
            complete.search_log, folder, phrase, window.selected_levels(level), stream, most_bytes, most_lines
        )
    except (ApiError, StoreUnavailable) as error:
        return hits.model_copy(update={"problem": error.detail if isinstance(error, ApiError) else str(error)}), 0
    update = {"matches": result.matches, "data": result.lines, "problem": result.problem}
    return hits.model_copy(update=update), result.searched_bytes


@router.get(
    "/{run_id}/logs/complete",
    response_class=StreamingResponse,
    dependencies=[DownloadLimit],
    responses={
        200: {
            "description": "Lines, each with its time, stream and level.",
            "content": {
                "text/plain": {
                    "schema": {"type": "string"},
                    "example": "2026-01-02T03:04:05.678Z stdout info step 10 loss 2.31\n",
                }
            },
        }
    },
)
async def get_complete_log(
    run_id: str,
    session: Session,
    storage: CurrentStorage,
    attempt: Annotated[
        int | None, Query(ge=1, le=2**31 - 1, description="Only the log of this attempt; default: of all, in order.")
    ] = None,
    grep: Annotated[str | None, Query(max_length=1000, description="Return only lines that contain this text.")] = None,
) -> StreamingResponse:
    """Download every line that the training processes printed, those too that the stream left out.

    The log of an attempt is a file that its worker writes. With an object store, it is there once the attempt has
    ended.
    """
    run = await service.get_run(session, run_id)
    attempts = [attempt] if attempt is not None else list(range(1, run.attempt + 1))
    folders = [(number, await _folder_or_error(session, storage, run_id, number)) for number in attempts]
    await release_connection(session)
    if len(folders) == 1:  # otherwise a line says which log is missing, and why
        await storage.in_thread(_list_files, folders[0][1])
    name = run_id if attempt is None else f"{run_id}-attempt-{attempt}"
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.log"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "private, no-store",
    }
    pieces = _attempt_texts(folders, grep)
    content = read_in_threads(storage, pieces, f"the log of {name}")
    return StreamingResponse(content, media_type="text/plain; charset=utf-8", headers=headers)


def _list_files(folder: FileFolder | ApiError) -> list[tuple[str, int]]:
    if isinstance(folder, ApiError):
        raise folder
    files = complete.files_of(folder)
    folder.compare_small(files)
    return files


def _attempt_texts(folders: Sequence[tuple[int, FileFolder | ApiError]], grep: str | None) -> Iterator[bytes]:
    for number, folder in folders:
        try:
            files = _list_files(folder)
        except ApiError as error:
            yield f"# attempt {number}: {error.detail}\n".encode()
            continue
        assert not isinstance(folder, ApiError)  # noqa: S101
        pieces = complete.read_text(folder, files)
        yield from complete.matching_lines(pieces, grep, complete.MOST_SEARCHED_BYTES) if grep else pieces
