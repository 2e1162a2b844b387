"""Endpoints of `/v1/runs`: translate between HTTP, the backends that execute runs, and the services of this folder."""

import gzip
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Depends, Query, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.gpus import find_gpu, gpu_names, may_be
from anneal.contracts.methods import TrainingMethod
from anneal.contracts.run_status import RunSort, TrainingStatus
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.checkpoints import CheckpointExport
from anneal.contracts.schemas.estimates import Estimated, KeptEstimate
from anneal.contracts.schemas.page import Page
from anneal.contracts.schemas.runs.bulk import RunChanges, RunsDelete, RunsStop, RunsTag
from anneal.contracts.schemas.runs.common import OTHER_RUN_ID, RUN_ID
from anneal.contracts.schemas.runs.comparison import RunComparison
from anneal.contracts.schemas.runs.reads import RunCounts, RunFull, RunRead, RunRow, RunStopped, RunSummary
from anneal.contracts.schemas.runs.requests import (
    EvaluationCreate,
    PredictionCreate,
    RunCheck,
    RunCreate,
    RunEdit,
    RunResume,
    RunStop,
    RunToEstimate,
)
from anneal.contracts.stop import StopMode
from app.api.authorization import CurrentCaller
from app.api.dependencies import CurrentSettings, CurrentStorage, Reading, Session, Snapshot
from app.api.errors import invalid
from app.api.pagination import FindQuery, PageQuery, SearchQuery
from app.audit import log as audit
from app.config import Settings
from app.estimator.steps import Data
from app.infra.storage import Storage
from app.runs import bulk
from app.runs.creating.creation import RunTransaction, check_request, find_by_idempotency_key
from app.runs.creating.estimates import probe, store
from app.runs.creating.estimates import service as estimates
from app.runs.creating.estimates.inputs import Subject, read_data
from app.runs.creating.validation.request import validate_request
from app.runs.dependencies import Backend, BackendOfRun, NewRun, backend_or_default
from app.runs.queue.eta import EtaService
from app.runs.reading import comparison, queries, serializers, stop_outlook
from app.runs.reading.metrics.dependencies import curve_read_slot
from app.runs.reading.metrics.outlines import read_outlines
from app.runs.state import deletion, service
from app.runs.state.checkpoints.service import best_good
from app.tables.runs import Run

router = APIRouter(prefix="/runs", tags=["runs"])


@router.post(
    "/estimate",
    responses={202: {"model": Estimated, "description": "With `probe`: a probe run was queued."}},
)
async def estimate_run(body: RunToEstimate, new: NewRun, settings: CurrentSettings, caller: CurrentCaller) -> Estimated:
    """Estimate memory, steps, tokens, time and cost of a run, and the devices it fits on, without creating it.

    With `probe`, a short run also measures it: two steps on the longest rows, of which nothing is kept. The probe is
    queued like any other run.
    """
    sessions, storage, expected = new.request.app.state.sessions, new.storage, None
    # Separate short sessions, so that no row stays locked and no connection in use during the computation.
    if body.probe:
        transaction = await new.build_transaction("/v1/runs/estimate")
        async with sessions() as reading:
            if earlier := await find_by_idempotency_key(reading, transaction.caller_id, transaction.idempotency):
                expected = await store.read_estimate(reading, earlier.id)
    else:
        audit.skip_audit(new.request)
    if expected is None:
        async with sessions() as reading:
            subject = await _estimate_subject(reading, settings, storage, body)
        turns: estimates.EstimateTurns = new.request.app.state.estimate_turns
        async with turns.take_turn(caller.key_id):
            computed = await estimates.estimate_run(sessions, settings, storage, subject)
        if not body.probe:
            return Estimated(**dict(computed))
        config = subject.plan.config
        expected = KeptEstimate(**dict(computed), eval_split=config.eval_split, stop_at_step=config.stop_at_step)
    run = await backend_or_default(new.request, body.backend).create_run(transaction, probe.probe_request(body))
    await store.store_estimate(transaction.session, run.id, expected)
    response = await new.respond_accepted(run)
    return Estimated(**dict(expected), probe_run_id=run.id, measured=response.measured, probe=response.probe)


async def _estimate_subject(
    session: AsyncSession, settings: Settings, storage: Storage, body: RunToEstimate
) -> Subject:
    if errors := list(_wrong_assumptions(body)):
        raise invalid(errors)
    # An estimate must work before the weights are downloaded; a probe loads them.
    validation = await validate_request(
        session, settings, storage, body, needs_weights=body.probe, has_known_gpu=body.device is not None
    )
    plan = validation.require_plan()
    if body.probe and not plan.rules.loads_model:
        message = f"backend `{body.backend}` loads no model, so there is nothing to measure; omit `probe`"
        raise invalid([FieldError(field="probe", code="not_supported", message=message)])
    gpu = find_gpu(body.device)
    if body.dataset_size is not None:
        data = Data(body.dataset_size.rows, None, mean=body.dataset_size.mean_tokens)
    else:
        data = await read_data(session, body.uploaded_dataset)
    subject = await estimates.with_sharding(session, settings, storage, Subject(plan, data, gpu=gpu))
    if body.probe and subject.sharded:
        message = "has the whole model on one device, and the model of this run is divided among several; omit `probe`"
        raise invalid([FieldError(field="probe", code="not_supported", message=message)])
    return subject


def _wrong_assumptions(body: RunToEstimate) -> Iterator[FieldError]:
    """Yield errors of what an estimate may assume: a dataset that is not here, and a device that no worker has."""
    if (body.dataset_id is None) == (body.dataset_size is None):
        message = "set either `dataset_id` or `dataset_size` (`rows`, and `mean_tokens` if it is known)"
        yield FieldError(field="dataset_id", code="conflict" if body.dataset_id else "missing", message=message)
    gpu = find_gpu(body.device)
    if body.device is not None and gpu is None:
        message = f"no GPU of this name is known; use one of {gpu_names()}, or omit it for those of online workers"
        yield FieldError(field="device", code="unknown_device", message=message)
    elif body.device is not None and body.resources.kind == "cpu":
        message = "is a GPU, but `resources.kind` asks for a CPU: omit one of them"
        yield FieldError(field="device", code="conflict", message=message)
    elif gpu is not None and body.resources.gpu is not None and not may_be(body.resources.gpu, gpu):
        message = f"is another GPU than `resources.gpu`, {body.resources.gpu!r}: omit one of them"
        yield FieldError(field="device", code="conflict", message=message)
    if body.probe and (body.dataset_size is not None or body.device is not None):
        message = "trains on rows of `dataset_id` on a worker: omit it, or `dataset_size` and `device`"
        yield FieldError(field="probe", code="conflict", message=message)


@router.post("", status_code=202)
async def create_run(body: RunCreate, new: NewRun) -> RunRead:
    """Create a run. It waits until a worker is free, and survives any restart."""
    run = await backend_or_default(new.request, body.backend).create_run(await new.build_transaction("/v1/runs"), body)
    return await new.respond_accepted(run)


@router.post("/validate")
async def validate_run(
    body: RunCreate, session: Session, settings: CurrentSettings, storage: CurrentStorage, caller: CurrentCaller
) -> RunCheck:
    """Validate a run without creating it: return its errors and the effective configuration."""
    return await check_request(session, settings, storage, body, caller.key_id)


@router.post("/evaluate", status_code=202)
async def evaluate_model(body: EvaluationCreate, new: NewRun) -> RunRead:
    """Evaluate a base model, the output of a run or a checkpoint on a dataset, without training.

    The evaluation is a run of task `evaluate`: it waits in the same queue, has events, and can be stopped. Its metrics
    are in its `eval` event and in `evaluation`.
    """
    transaction = await new.build_transaction("/v1/runs/evaluate")
    return await new.respond_accepted(await backend_or_default(new.request, None).evaluate_model(transaction, body))


@router.post("/predict", status_code=202)
async def predict_rows(body: PredictionCreate, new: NewRun) -> RunRead:
    """Answer the rows of a dataset with a base model, the output of a run or a checkpoint, without training.

    The prediction is a run of task `predict`: it waits in the same queue, has events, saves checkpoints, and can be
    stopped and resumed. Its output is the answers beside their prompts, references and scores, in the order of the
    dataset (`predictions.jsonl` and `predictions.parquet`); its scores are in its `eval` event and in `evaluation`.
    """
    transaction = await new.build_transaction("/v1/runs/predict")
    return await new.respond_accepted(await backend_or_default(new.request, None).predict_rows(transaction, body))


@router.post("/stop")
async def stop_runs(body: RunsStop, request: Request, session: Session, after_commit: BackgroundTasks) -> RunChanges:
    """Stop several runs; of one that has ended meanwhile the outcome is `unchanged`."""
    transaction = RunTransaction(session, after_commit)

    async def apply_stop(run_id: str) -> bool:
        # Not the whole row, which the session would return again after the stop.
        before = await service.requested_stop(session, run_id)
        run, *_ = await _request_stop(backend_or_default(request, before.backend), transaction, run_id, body)
        return (run.stop_requested_at, run.stop_mode) != (before.stop_requested_at, before.stop_mode)

    return await bulk.change_each(request, session, body.ids, apply_stop, already="run_has_ended")


@router.post("/delete")
async def delete_runs(
    body: RunsDelete, request: Request, session: Session, after_commit: BackgroundTasks
) -> RunChanges:
    """Delete several runs that have ended, with their events, checkpoints and outputs.

    The runs of a fine-tuning job are deleted together: those of a job of which `ids` lacks a run are refused.
    """
    runs_of_job = await deletion.lock_by_job(session, body.ids)
    deleted: set[str] = set()

    async def apply_delete(run_id: str) -> bool:
        if run_id not in deleted:
            together = runs_of_job.get(run_id, [run_id])
            await deletion.delete_runs(session, together)
            deleted.update(together)
        return True

    after_commit.add_task(deletion.delete_remaining_data, request.app.state.sessions, request.app.state.storage)
    return await bulk.change_each(request, session, body.ids, apply_delete, already="run_not_found")


@router.post("/tag")
async def tag_runs(body: RunsTag, request: Request, session: Session) -> RunChanges:
    """Add tags to several runs, or remove some."""

    async def apply_tags(run_id: str) -> bool:
        return await bulk.edit_tags(session, run_id, body.add, body.remove)

    return await bulk.change_each(request, session, body.ids, apply_tags, already="")


async def _query_filters(
    experiment_id: Annotated[str | None, Query(max_length=100)] = None,
    tag: Annotated[str | None, Query(max_length=200)] = None,
    parent_run_id: Annotated[str | None, Query(max_length=100)] = None,
    base_model: Annotated[str | None, Query(max_length=300)] = None,
    method: Annotated[TrainingMethod | None, Query(description="Only runs of this method.")] = None,
    task: Annotated[RunTask | None, Query(description="Only runs of this task.")] = None,
    dataset_id: Annotated[
        str | None, Query(max_length=100, description="Only runs that train or evaluate on this dataset.")
    ] = None,
    find: FindQuery = None,
    search: SearchQuery = None,
) -> queries.Filters:
    return queries.Filters(experiment_id, (), tag, parent_run_id, base_model, method, task, find, search, dataset_id)


FiltersQuery = Annotated[queries.Filters, Depends(_query_filters)]


@router.get("", response_model=Page[RunSummary] | Page[RunFull] | Page[RunRow])
async def list_runs(
    request: Request,
    storage: CurrentStorage,
    paging: PageQuery,
    filters: FiltersQuery,
    status: Annotated[list[TrainingStatus] | None, Query(description="Only runs with one of these statuses.")] = None,
    sort: Annotated[
        RunSort,
        Query(
            description="`created_at`: newest first. `live`: running runs first, then waiting ones, then ended ones, "
            "each newest first. `best`: best first within each method, by `best_eval`, then runs without an evaluation "
            "by `best_loss`; runs without either last, no probes and evaluations, predictions only with "
            "`task=predict`. Others: by this value (`seconds`: from its first start to its end); runs without it "
            "last. The order of "
            "running runs may change between pages, so one may appear twice or not at all."
        ),
    ] = "created_at",
    order: Annotated[
        queries.Order | None,
        Query(
            description="Direction of `sort`; null: names and losses ascending, all others descending. `live` and "
            "`best` have only one."
        ),
    ] = None,
    view: Annotated[
        queries.View,
        Query(
            description="`summary`: runs without their configuration (`RunSummary`). `full`: with it (`RunFull`). "
            "`row`: what a table shows of a run (`RunRow`), with an outline of its loss curve; values that are not "
            "known are absent."
        ),
    ] = "summary",
) -> Response:
    """List runs, newest first unless another order is requested."""
    filters = replace(filters, status=tuple(status or ()))
    state = request.app.state
    engine = state.snapshot_engine if sort in queries.READ_IN_PARTS else state.reading_engine
    async with engine.connect() as connection:
        rows, has_more = await queries.list_runs(
            connection, filters, paging, queries.Sorting.from_request(sort, order), view
        )
        outlines_by_run = await read_outlines(connection, {row.id: row.method for row in rows}) if view == "row" else {}
    predictions = await _eta_service(request).of({row.id: row.status for row in rows})
    if view == "row":
        return _gzip_response(request, serializers.row_page(rows, has_more, predictions, outlines_by_run))
    page = serializers.run_page(storage, rows, has_more, predictions, full=view == "full")
    return Response(page, media_type="application/json")


@router.get("/counts")
async def count_runs(session: Reading, filters: FiltersQuery) -> RunCounts:
    """Count runs by status, with the filters of the list."""
    counts = await queries.count_by_status(session, filters)
    return RunCounts(counts=counts, total=sum(counts.values()))


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
    """Compare runs: what they have in common, where their configurations and resources differ, and their results."""
    return await comparison.compare_runs(session, [part.strip() for part in ids.split(",") if part.strip()])


@router.get("/{run_id}")
async def get_run(run_id: str, request: Request, session: Session, storage: CurrentStorage) -> RunRead:
    """Get a run with its newest metrics."""
    run = await service.get_run(session, run_id)
    predictions = await _eta_service(request).of({run.id: run.status})
    return await serializers.run_read(session, storage, run, predictions.get(run.id))


@router.patch(
    "/{run_id}",
    responses={409: {"description": "The run has ended or answers questions, and its priority was to change."}},
)
async def edit_run(run_id: str, body: RunEdit, request: Request, session: Session, storage: CurrentStorage) -> RunRead:
    """Rename or tag a run, change its priority, or pin it to protect it from deletion."""
    await _eta_service(request).renew()  # before the row is locked, because its worker would wait for the lock
    run = await service.edit_run(session, run_id, body)
    predictions = _eta_service(request).newest({run.id: run.status})
    return await serializers.run_read(session, storage, run, predictions.get(run.id))


@router.delete(
    "/{run_id}",
    status_code=204,
    responses={
        409: {
            "description": "It has not ended, is pinned or needed by another run, or is one of several runs of a job."
        }
    },
)
async def delete_run(run_id: str, request: Request, session: Session, after_commit: BackgroundTasks) -> None:
    """Delete a run that has ended, with its events, checkpoints and output.

    A run of a fine-tuning job of several runs is refused: `POST /v1/runs/delete` deletes them together.
    """
    await deletion.delete_runs(session, [run_id])
    after_commit.add_task(deletion.delete_remaining_data, request.app.state.sessions, request.app.state.storage)


@router.post(
    "/{run_id}/stop", status_code=202, responses={409: {"description": "The run has already ended by itself."}}
)
async def stop_run(
    run_id: str,
    backend: BackendOfRun,
    session: Session,
    settings: CurrentSettings,
    storage: CurrentStorage,
    after_commit: BackgroundTasks,
    body: RunStop | None = None,
) -> RunStopped:
    """Stop a run. A pending one ends at once, a running one within the grace period or, if requested, after its epoch.

    A repeated request has an effect only if it asks for an immediate stop after `epoch_end`, or for `discard`.
    """
    run, mode, found_no_best = await _request_stop(
        backend, RunTransaction(session, after_commit), run_id, body or RunStop()
    )
    grace = settings.save_grace_seconds if run.stop_grace_seconds is None else run.stop_grace_seconds
    outlook = await stop_outlook.describe_stop(session, run, mode, grace, found_no_best=found_no_best)
    return await serializers.run_stopped(session, storage, run, outlook)


async def _request_stop(
    backend: Backend, transaction: RunTransaction, run_id: str, request: RunStop
) -> tuple[Run, StopMode, bool]:
    """Request the stop; return the run, the mode in effect, and True if there is no best checkpoint to stop with."""
    session, mode = transaction.session, request.how
    found_no_best = mode == "best" and await best_good(session, run_id) is None
    mode = "checkpoint" if found_no_best else mode
    task = await service.task_of(session, run_id)
    if task is not RunTask.train:  # it has no epochs and no best weights
        found_no_best = False
        mode = "checkpoint" if task.saves_checkpoints and mode != "discard" else "discard"
    return await backend.stop_run(transaction, run_id, mode, request.deadline_seconds), mode, found_no_best


@router.post(
    "/{run_id}/resume",
    status_code=202,
    responses={409: {"description": "The run has not ended yet, or has no checkpoint."}},
)
async def resume_run(run_id: str, backend: BackendOfRun, new: NewRun, body: RunResume | None = None) -> RunRead:
    """Resume a run that has ended. Returns a new run whose parent is this one."""
    transaction = await new.build_transaction(f"/v1/runs/{run_id}/resume")
    return await new.respond_accepted(await backend.resume_run(transaction, run_id, body or RunResume()))


@router.post(
    "/{run_id}/checkpoints/{checkpoint_id}/export",
    status_code=202,
    tags=["checkpoints"],
    responses={409: {"description": "The run has not ended yet, or the checkpoint is corrupt."}},
)
async def export_checkpoint(
    run_id: str, checkpoint_id: str, backend: BackendOfRun, new: NewRun, body: CheckpointExport | None = None
) -> RunRead:
    """Export a checkpoint as a run of its own, whose output is the model.

    Works for runs that completed, failed or were stopped. The id of the new run can be the base model of other runs.
    """
    transaction = await new.build_transaction(f"/v1/runs/{run_id}/checkpoints/{checkpoint_id}/export")
    export_run = await backend.export_checkpoint(transaction, run_id, checkpoint_id, body or CheckpointExport())
    return await new.respond_accepted(export_run)


def _eta_service(request: Request) -> EtaService:
    eta: EtaService = request.app.state.eta
    return eta


def _gzip_response(request: Request, body: bytes) -> Response:
    """Return JSON that a page reads every few seconds, with gzip where it is accepted: a quarter of the bytes."""
    headers = {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = gzip.compress(body, 1, mtime=0), "gzip"
    return Response(body, media_type="application/json", headers=headers)
