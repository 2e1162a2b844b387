"""Endpoints of `/v1/runs`: translate between HTTP and `service`, `listing`, `removal`, `resume` and `curves`."""

from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Depends, Query, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.dependencies import CurrentSettings, CurrentStorage, Reading, Session, Snapshot
from app.api.errors import invalid
from app.api.pagination import PageQuery
from app.audit import log as audit
from app.contracts.backends import BACKEND_RULES
from app.contracts.errors import FieldError
from app.contracts.run_status import TrainingStatus
from app.contracts.schemas.estimates import Estimated, KeptEstimate
from app.contracts.schemas.page import Page
from app.contracts.schemas.runs import (
    OTHER_RUN_ID,
    RUN_ID,
    RunCheck,
    RunComparison,
    RunCreate,
    RunEdit,
    RunRead,
    RunResume,
    RunStop,
    RunStopped,
    RunSummary,
    RunToEstimate,
)
from app.infra.broker import Broker
from app.runs import comparison, deletion, queries, serializers, service, stop_outlook
from app.runs.checkpoints.service import best_good
from app.runs.creation import RunContext, check, create, replayed
from app.runs.dependencies import NewRun, curve_read_slot
from app.runs.estimates import probe, store
from app.runs.estimates import service as estimates
from app.runs.estimates.store import estimate_and_store
from app.runs.resume import resume
from app.runs.scheduler.eta import EtaService
from app.runs.validation.request import validate_request
from app.runs.validation.result import validation_failed

router = APIRouter(prefix="/runs", tags=["runs"])


@router.post(
    "/estimate",
    responses={202: {"model": Estimated, "description": "With `probe`: a probe run was queued."}},
)
async def estimate_run(body: RunToEstimate, new: NewRun) -> Estimated:
    """Estimate memory, steps, tokens, time and cost of a run, and the devices it fits on, without creating it.

    With `probe`, a short run also measures it: two steps on the longest rows, of which nothing is kept. The probe is
    queued like any other run.
    """
    idempotency = None
    if body.probe:
        idempotency = await new.idempotency("/v1/runs/estimate")
    else:
        audit.skip_audit(new.request)
    sessions, expected = new.request.app.state.sessions, None
    # Separate short sessions, so that no row stays locked and no connection in use during the computation.
    async with sessions() as reading:
        if earlier := await replayed(reading, new.caller_id, idempotency):
            expected = await store.get(reading, earlier.id)
    if expected is None:
        async with sessions() as reading:
            subject = await _subject(reading, new.around, body)
        computed = await estimates.estimate(sessions, new.around.settings, new.around.storage, subject)
        if not body.probe:
            return Estimated(**dict(computed))
        config = subject.config
        expected = KeptEstimate(**dict(computed), eval_split=config.eval_split, stop_at_step=config.stop_at_step)
    run = await create(new.session, new.around, probe.request_of(body), new.caller_id, idempotency)
    await store.store(new.session, run.id, expected)
    new.accept(run)
    shown = await serializers.run_read(new.session, new.around.storage, run)
    return Estimated(**dict(expected), probe_run_id=run.id, measured=shown.measured, probe=shown.probe)


async def _subject(session: AsyncSession, around: RunContext, body: RunToEstimate) -> estimates.Subject:
    # An estimate must work before the weights are downloaded; a probe loads them.
    found = await validate_request(
        session, around.settings, around.storage, around.rules, body, needs_weights=body.probe
    )
    if found.errors or found.config is None:
        raise validation_failed(found.errors)
    rules = around.rules[body.backend]
    if body.probe and not rules.loads_model:
        message = f"backend `{body.backend}` loads no model, so there is nothing to measure; omit `probe`"
        raise invalid([FieldError(field="probe", code="not_supported", message=message)])
    data = await estimates.data_of(session, body.dataset_id)
    return estimates.Subject(found.config, found.given, body.backend, data, rules.loads_model)


@router.post("", status_code=202)
async def create_run(body: RunCreate, new: NewRun) -> RunRead:
    """Create a run. It waits until a worker is free, and survives any restart."""
    idempotency = await new.idempotency("/v1/runs")
    run = await create(new.session, new.around, body, new.caller_id, idempotency)
    new.accept(run)
    if BACKEND_RULES[run.backend].loads_model:
        new.after_commit.add_task(
            estimate_and_store, new.request.app.state.sessions, new.around.settings, new.around.storage, run
        )
    return await serializers.run_read(new.session, new.around.storage, run)


@router.post("/validate")
async def validate_run(
    body: RunCreate, session: Session, settings: CurrentSettings, storage: CurrentStorage
) -> RunCheck:
    """Validate a run without creating it: return its errors and the effective configuration."""
    return await check(session, RunContext(settings, storage, BACKEND_RULES), body)


@router.get("", response_model=Page[RunSummary])
async def list_runs(
    request: Request,
    session: Reading,
    storage: CurrentStorage,
    paging: PageQuery,
    experiment_id: Annotated[str | None, Query(max_length=100)] = None,
    status: Annotated[list[TrainingStatus] | None, Query(description="Only runs with one of these statuses.")] = None,
    tag: Annotated[str | None, Query(max_length=200)] = None,
    parent_run_id: Annotated[str | None, Query(max_length=100)] = None,
    base_model: Annotated[str | None, Query(max_length=300)] = None,
    sort: Annotated[
        queries.Sort,
        Query(
            description="`created_at`: newest first. `best_loss`: lowest loss first, runs without one last, no probes; "
            "the order of running runs may change between pages, so one may appear twice or not at all."
        ),
    ] = "created_at",
) -> Response:
    """List runs, newest or best first."""
    filters = queries.Filters(experiment_id, tuple(status or ()), tag, parent_run_id, base_model)
    rows, has_more = await queries.page(session, filters, paging, sort)
    predictions = await _forecasts(request).of({row.id: row.status for row in rows})
    return Response(serializers.run_page(storage, rows, has_more, predictions), media_type="application/json")


@router.get(
    "/compare",
    dependencies=[Depends(curve_read_slot, scope="function")],
    responses={404: {"description": "One of the runs does not exist."}},
)
async def compare_runs(
    session: Snapshot,
    ids: Annotated[
        str,
        Query(
            max_length=2000, description="IDs of 2 to 20 runs, comma-separated.", examples=[f"{RUN_ID},{OTHER_RUN_ID}"]
        ),
    ],
) -> RunComparison:
    """Compare runs: what they have in common, where their configurations differ, and their results."""
    return await comparison.compare(session, [part.strip() for part in ids.split(",") if part.strip()])


@router.get("/{run_id}")
async def get_run(run_id: str, request: Request, session: Session, storage: CurrentStorage) -> RunRead:
    """Get a run with its newest metrics."""
    run = await service.get(session, run_id)
    predictions = await _forecasts(request).of({run.id: run.status})
    return await serializers.run_read(session, storage, run, predictions.get(run.id))


@router.patch("/{run_id}")
async def edit_run(run_id: str, body: RunEdit, request: Request, session: Session, storage: CurrentStorage) -> RunRead:
    """Rename or tag a run, or pin it to protect it from deletion."""
    await _forecasts(request).renew()  # before the row is locked, because its worker would wait for the lock
    run = await service.edit(session, run_id, body)
    predictions = _forecasts(request).newest({run.id: run.status})
    return await serializers.run_read(session, storage, run, predictions.get(run.id))


@router.delete(
    "/{run_id}",
    status_code=204,
    responses={409: {"description": "The run has not ended, is pinned, or is needed by another run."}},
)
async def delete_run(run_id: str, request: Request, session: Session, after_commit: BackgroundTasks) -> None:
    """Delete a run that has ended, with its events, checkpoints and output."""
    await deletion.remove(session, run_id)
    after_commit.add_task(deletion.finish, request.app.state.sessions, request.app.state.storage)


@router.post(
    "/{run_id}/stop", status_code=202, responses={409: {"description": "The run has already ended by itself."}}
)
async def stop_run(
    run_id: str,
    request: Request,
    session: Session,
    settings: CurrentSettings,
    storage: CurrentStorage,
    after_commit: BackgroundTasks,
    body: RunStop | None = None,
) -> RunStopped:
    """Stop a run. A pending one ends at once, a running one within the grace period or, if requested, after its epoch.

    A repeated request has an effect only if it asks for an immediate stop after `epoch_end`, or for `discard`.
    """
    mode = (body or RunStop()).how
    found_no_best = mode == "best" and await best_good(session, run_id) is None
    mode = "checkpoint" if found_no_best else mode
    run = await service.stop(session, run_id, mode)
    outlook = await stop_outlook.outlook(session, run, mode, settings.save_grace_seconds, found_no_best=found_no_best)
    after_commit.add_task(_queue(request).call_worker, run_id)
    after_commit.add_task(_queue(request).wake, run_id)
    return await serializers.run_stopped(session, storage, run, outlook)


@router.post(
    "/{run_id}/resume",
    status_code=202,
    responses={409: {"description": "The run has not ended yet, or has no checkpoint."}},
)
async def resume_run(run_id: str, new: NewRun, body: RunResume | None = None) -> RunRead:
    """Resume a run that has ended. Returns a new run whose parent is this one."""
    idempotency = await new.idempotency(f"/v1/runs/{run_id}/resume")
    run = await resume(new.session, new.around, run_id, body or RunResume(), new.caller_id, idempotency)
    new.accept(run)
    return await serializers.run_read(new.session, new.around.storage, run)


def _forecasts(request: Request) -> EtaService:
    forecasts: EtaService = request.app.state.forecasts
    return forecasts


def _queue(request: Request) -> Broker:
    queue: Broker = request.app.state.queue
    return queue
