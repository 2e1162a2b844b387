"""Endpoints of `/v1/runs`: translate between HTTP and `service`, `listing`, `removal`, `resume` and `curves`."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Depends, Query, Request, Response

from app.backends.registry import RULES
from app.checkpoints.service import best_good
from app.dependencies import CurrentSettings, CurrentStorage, Reading, Session, Snapshot
from app.estimates.kept import keep
from app.pagination import Page, PageQuery
from app.queue import Queue
from app.runs import comparison, curves, listing, removal, service, stopping, views
from app.runs.config import TrainingStatus
from app.runs.forecasts import Forecasts
from app.runs.making import NewRun
from app.runs.resume import resume
from app.runs.schemas import (
    OTHER_RUN_ID,
    RUN_ID,
    RunCheck,
    RunComparison,
    RunCreate,
    RunEdit,
    RunMetrics,
    RunRead,
    RunResume,
    RunStop,
    RunStopped,
    RunSummary,
)

router = APIRouter(prefix="/runs", tags=["runs"])


async def _turn(request: Request) -> AsyncIterator[None]:
    """Limit concurrent reads of curves; requests wait before the session takes a connection, so that they hold none."""
    async with request.app.state.curve_reads:
        yield


@router.post("", status_code=202)
async def create_run(body: RunCreate, new: NewRun) -> RunRead:
    """Create a run. It waits until a worker is free, and survives any restart."""
    idempotency = await new.idempotency("/v1/runs")
    run = await service.create(new.session, new.around, body, new.caller_id, idempotency)
    new.accept(run)
    if RULES[run.backend].loads_model:
        new.after_commit.add_task(keep, new.request.app.state.sessions, new.around.settings, new.around.storage, run)
    return await views.one(new.session, new.around.storage, run)


@router.post("/validate")
async def validate_run(
    body: RunCreate, session: Session, settings: CurrentSettings, storage: CurrentStorage
) -> RunCheck:
    """Validate a run without creating it: return its errors and the effective configuration."""
    return await service.check(session, service.Surroundings(settings, storage, RULES), body)


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
        listing.Sort,
        Query(
            description="`created_at`: newest first. `best_loss`: lowest loss first, runs without one last, no probes; "
            "the order of running runs may change between pages, so one may appear twice or not at all."
        ),
    ] = "created_at",
) -> Response:
    """List runs, newest or best first."""
    filters = listing.Filters(experiment_id, tuple(status or ()), tag, parent_run_id, base_model)
    rows, has_more = await listing.page(session, filters, paging, sort)
    predictions = await _forecasts(request).of({row.id: row.status for row in rows})
    return Response(views.page(storage, rows, has_more, predictions), media_type="application/json")


@router.get(
    "/compare",
    dependencies=[Depends(_turn, scope="function")],
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
    return await views.one(session, storage, run, predictions.get(run.id))


@router.patch("/{run_id}")
async def edit_run(run_id: str, body: RunEdit, request: Request, session: Session, storage: CurrentStorage) -> RunRead:
    """Rename or tag a run, or pin it to protect it from deletion."""
    await _forecasts(request).renew()  # before the row is locked, because its worker would wait for the lock
    run = await service.edit(session, run_id, body)
    predictions = _forecasts(request).newest({run.id: run.status})
    return await views.one(session, storage, run, predictions.get(run.id))


@router.delete(
    "/{run_id}",
    status_code=204,
    responses={409: {"description": "The run has not ended, is pinned, or is needed by another run."}},
)
async def delete_run(run_id: str, request: Request, session: Session, after_commit: BackgroundTasks) -> None:
    """Delete a run that has ended, with its events, checkpoints and output."""
    await removal.remove(session, run_id)
    after_commit.add_task(removal.finish, request.app.state.sessions, request.app.state.storage)


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
    outlook = await stopping.outlook(session, run, mode, settings.save_grace_seconds, found_no_best=found_no_best)
    after_commit.add_task(_queue(request).call_worker, run_id)
    after_commit.add_task(_queue(request).wake, run_id)
    return await views.stopped(session, storage, run, outlook)


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
    return await views.one(new.session, new.around.storage, run)


@router.get("/{run_id}/metrics", dependencies=[Depends(_turn, scope="function")])
async def get_metrics(
    run_id: str,
    session: Snapshot,
    names: Annotated[
        str | None,
        Query(
            max_length=2000,
            description="Series, comma-separated: `loss`, `learning_rate`, … of the metrics, `extra.<name>` of their "
            "`extra`, `eval.<name>` of the evaluations (`eval_loss` is short for `eval.eval_loss`). Default: all "
            "series of the run. A series that it does not have is empty.",
            examples=["loss,extra.tokens_per_second,eval.eval_loss"],
        ),
    ] = None,
    max_points: Annotated[int, Query(ge=4, le=100_000, description="Maximum number of points per series.")] = 1000,
    from_step: Annotated[int, Query(ge=0, le=2**53)] = 0,
    to_step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> RunMetrics:
    """Get the curves of a run; thinned curves keep every extreme."""
    # The name of a metric in an evaluation is accepted for its series.
    parts = [name.strip() for name in names.split(",") if name.strip()] if names else []
    asked = {name: f"eval.{name}" if name.startswith("eval_") else name for name in parts}
    wanted = list(dict.fromkeys(asked.values())) if names else None
    found = await curves.curves(session, run_id, wanted, from_step, to_step, max_points)
    return RunMetrics(run_id=run_id, series={name: found[full] for name, full in asked.items()} if asked else found)


def _forecasts(request: Request) -> Forecasts:
    forecasts: Forecasts = request.app.state.forecasts
    return forecasts


def _queue(request: Request) -> Queue:
    queue: Queue = request.app.state.queue
    return queue
