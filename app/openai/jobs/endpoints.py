"""`/openai/v1/fine_tuning/jobs`: runs that train as OpenAI's clients create, follow and change them."""

import re
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, BackgroundTasks, Depends, Query, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.openai.jobs import MOST_METADATA, JobCheckpoint, JobCreate, JobEvent, JobObject
from anneal.contracts.schemas.openai.lists import ListPage
from app.api.authorization import CurrentCaller
from app.api.dependencies import Reading, Session
from app.api.errors import invalid
from app.openai.ids import to_native_id, to_openai_id
from app.openai.jobs import changes, creation, events, reading
from app.openai.retries import find_idempotency
from app.runs.creating.creation import RunTransaction
from app.runs.dependencies import backend_or_default
from app.runs.queue.eta import EtaService

router = APIRouter(prefix="/fine_tuning/jobs")

_CALL = "/openai/v1/fine_tuning/jobs"
_HAS_ENDED: dict[int | str, dict[str, Any]] = {409: {"description": "The job has ended, or is about to be paused."}}
_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)
_METADATA_PARAMETER = {
    "name": "metadata",
    "in": "query",
    "required": False,
    "style": "deepObject",
    "explode": True,
    "description": "Only jobs with all of these metadata, each as `metadata[name]=value`. `metadata=null`: only jobs "
    "without metadata.",
    "schema": {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MOST_METADATA},
}
Limit = Annotated[int, Query(ge=1, le=100, description="Maximum number of items.")]
After = Annotated[str | None, Query(max_length=100, description="ID of the last item of the previous page.")]


async def _transaction(session: Session, caller: CurrentCaller, after_commit: BackgroundTasks) -> RunTransaction:
    return RunTransaction(session, after_commit, caller.key_id)


Transaction = Annotated[RunTransaction, Depends(_transaction, scope="function")]


@router.post("")
async def create_job(body: JobCreate, request: Request, response: Response, transaction: Transaction) -> JobObject:
    """Create a fine-tuning job: a run that trains the model on a file."""
    content, after_commit = await request.body(), transaction.after_commit
    idempotency = await find_idempotency(request, str(transaction.caller_id), _CALL, content, after_commit)
    backend = backend_or_default(request, body.anneal.backend)
    run = await creation.create_job(replace(transaction, idempotency=idempotency), backend, body)
    response.headers["Location"] = f"{_CALL}/{to_openai_id(run.id)}"
    return await _read_job(transaction.session, to_openai_id(run.id))


@router.get("", response_model=ListPage[JobObject], openapi_extra={"parameters": [_METADATA_PARAMETER]})
async def list_jobs(
    request: Request,
    limit: Limit = 20,
    after: After = None,
    metadata: Annotated[Literal["null"] | None, Query(include_in_schema=False)] = None,
) -> Response:
    """List jobs, newest first: all runs that train, without those that have resumed a job."""
    last = to_native_id(after, "run") if after is not None else None
    if after is not None and last is None:
        raise invalid([FieldError(field="after", code="not_an_id", message="must be the ID of a job")])
    members = _metadata_filter(request)
    if metadata is not None and members:
        message = "cannot be `null` together with `metadata[name]=value`; use one of them"
        raise invalid([FieldError(field="metadata", code="conflict", message=message)])
    async with request.app.state.reading_engine.connect() as connection:
        rows, has_more = await reading.list_jobs(connection, limit, last, members if metadata is None else None)
    predictions = await _eta_service(request).of({row.run_id: row.status for row in rows})
    jobs = [reading.job_object(row, predictions.get(row.run_id)) for row in rows]
    # Serialized here: the framework would validate each job once more.
    page = ListPage[JobObject].from_items(jobs, has_more=has_more)
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/{job_id}")
async def get_job(job_id: str, request: Request, session: Reading) -> JobObject:
    """Get a job, with the predicted time of its end."""
    row = await reading.find_job(session, job_id)
    predictions = await _eta_service(request).of({row.run_id: row.status})
    return reading.job_object(row, predictions.get(row.run_id))


@router.post("/{job_id}/cancel", responses=_HAS_ENDED)
async def cancel_job(job_id: str, request: Request, transaction: Transaction) -> JobObject:
    """Cancel a job: its run ends without saving, and it cannot be resumed. Checkpoints that exist are kept."""
    await changes.cancel_job(transaction, partial(backend_or_default, request), job_id)
    return await _read_job(transaction.session, job_id)


@router.post("/{job_id}/pause", responses=_HAS_ENDED)
async def pause_job(job_id: str, request: Request, transaction: Transaction) -> JobObject:
    """Pause a job: it saves a checkpoint and frees its device. Its status is `paused` once that is done."""
    await changes.pause_job(transaction, partial(backend_or_default, request), job_id)
    return await _read_job(transaction.session, job_id)


@router.post("/{job_id}/resume", responses=_HAS_ENDED)
async def resume_job(job_id: str, request: Request, transaction: Transaction) -> JobObject:
    """Resume a paused or failed job exactly where its newest checkpoint is. It keeps its ID."""
    await changes.resume_job(transaction, partial(backend_or_default, request), job_id)
    return await _read_job(transaction.session, job_id)


@router.get("/{job_id}/events")
async def list_events(job_id: str, session: Reading, limit: Limit = 20, after: After = None) -> ListPage[JobEvent]:
    """List the events of a job, newest first; `GET /v1/runs/{id}/events` streams all of a run."""
    job = await reading.find_job(session, job_id)
    page, has_more = await events.list_events(session, job, limit, after)
    return ListPage[JobEvent].from_items(page, has_more=has_more)


@router.get("/{job_id}/checkpoints")
async def list_checkpoints(
    job_id: str, session: Reading, limit: Limit = 10, after: After = None
) -> ListPage[JobCheckpoint]:
    """List the checkpoints of a job whose files exist, newest first."""
    job = await reading.find_job(session, job_id)
    page, has_more = await events.list_checkpoints(session, job, limit, after)
    return ListPage[JobCheckpoint].from_items(page, has_more=has_more)


async def _read_job(session: AsyncSession, job_id: str) -> JobObject:
    return reading.job_object(await reading.find_job(session, job_id))


def _metadata_filter(request: Request) -> dict[str, str]:
    parameters = request.query_params.multi_items()
    return {match[1]: value for name, value in parameters if (match := _METADATA.fullmatch(name))}


def _eta_service(request: Request) -> EtaService:
    eta: EtaService = request.app.state.eta
    return eta
