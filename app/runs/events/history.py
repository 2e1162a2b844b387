"""`GET /v1/runs/{id}/attempts` and `…/history`: what happened to a run, apart from its lines and metrics."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy import select, text

from anneal.contracts.events import EVENT_TYPES
from anneal.contracts.schemas.page import Page
from anneal.contracts.schemas.runs.common import RUN_ID
from anneal.contracts.schemas.runs.reads import AttemptRead
from app.api.dependencies import Reading
from app.runs.events import log, responses
from app.runs.events.frames import Frame
from app.runs.state import service
from app.tables.events import FREQUENT_TYPES
from app.tables.runs import Attempt
from app.tables.workers import Worker

router = APIRouter(prefix="/runs", tags=["runs"])

_EXAMPLE = {
    "type": "status", "run_id": RUN_ID, "seq": 12, "ts": "2026-01-02T03:04:06.001Z", "from": "initializing",
    "to": "running", "reason": "training", "attempt": 1,
}  # fmt: skip
_TYPES = tuple(kind for kind in EVENT_TYPES if f"'{kind}'" not in FREQUENT_TYPES)
_NEWEST = text(
    f"""
    SELECT seq, type, ts, data::text FROM run_events
    WHERE run_id = :run_id AND type NOT IN {FREQUENT_TYPES} AND seq < :before
        AND (cast(:types AS text[]) IS NULL OR type = ANY(:types))
    ORDER BY seq DESC LIMIT :limit
    """
)


@router.get("/{run_id}/attempts")
async def list_attempts(run_id: str, session: Reading) -> Page[AttemptRead]:
    """List the attempts of a run, oldest first."""
    run = await service.get_run(session, run_id)
    query = (
        select(Attempt, Worker.host)
        .outerjoin(Worker, Worker.id == Attempt.worker_id)
        .where(Attempt.run_id == run.id)
        .order_by(Attempt.attempt)
    )
    attempts = [
        AttemptRead(
            attempt=row.attempt,
            worker_id=row.worker_id,
            worker=host,
            start_step=row.start_step,
            started_at=row.started_at,
            ended_at=row.ended_at,
            outcome=row.outcome,
        )
        for row, host in (await session.execute(query)).all()
    ]
    return Page(data=attempts, has_more=False)


@router.get(
    "/{run_id}/history",
    responses={
        200: {
            "description": "A page of events as in the event stream, in order.",
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "properties": {
                            "data": {"type": "array", "items": responses.LINES_SCHEMA},
                            "has_more": {"type": "boolean"},
                        },
                    },
                    "example": {"data": [_EXAMPLE], "has_more": False},
                }
            },
        }
    },
)
async def get_history(
    run_id: str,
    session: Reading,
    before: Annotated[int, Query(ge=1, le=2**62, description="Only events before this `seq`.")] = 2**62,
    limit: Annotated[int, Query(ge=1, le=1000)] = 500,
    types: Annotated[
        str | None,
        Query(max_length=1000, description="Return only these types, comma-separated.", examples=["config,repair"]),
    ] = None,
) -> Response:
    """Get the newest events of a run other than lines, metrics, progress, telemetry and distributions, in order."""
    chosen = responses.chosen_types(types, _TYPES)
    run = await service.get_run(session, run_id)
    parameters = {
        "run_id": run.id,
        "before": before,
        "limit": limit + 1,
        "types": None if chosen is None else list(chosen),
    }
    rows = (await session.execute(_NEWEST, parameters)).all()
    lines = [
        Frame(seq, kind, log.event_json(run.id, seq, ts, data).encode()).line.rstrip(b"\n")
        for seq, kind, ts, data in rows[:limit][::-1]
    ]
    has_more = b"true" if len(rows) > limit else b"false"
    return Response(b'{"data":[%s],"has_more":%s}' % (b",".join(lines), has_more), media_type="application/json")
