"""Endpoints `/v1/experiments`."""

from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Query, Request, Response

from anneal.contracts.schemas.experiments import ExperimentCreate, ExperimentEdit, ExperimentSummary, ExperimentView
from anneal.contracts.schemas.page import Page
from app.api.authorization import CurrentCaller
from app.api.dependencies import Session
from app.api.pagination import FindQuery, PageQuery, SearchQuery
from app.experiments import service
from app.runs.state import deletion

router = APIRouter(prefix="/experiments", tags=["experiments"])


@router.post("", status_code=201)
async def create_experiment(
    body: ExperimentCreate, session: Session, caller: CurrentCaller, response: Response
) -> ExperimentView:
    """Create an experiment, a group of runs to compare."""
    experiment = await service.create_experiment(session, body, caller.key_id)
    response.headers["Location"] = f"/v1/experiments/{experiment.id}"
    return await _read_view(session, experiment.id)


@router.get("")
async def list_experiments(
    session: Session, paging: PageQuery, find: FindQuery = None, search: SearchQuery = None
) -> Page[ExperimentSummary]:
    """List experiments, newest first."""
    rows, has_more = await service.list_experiments(session, paging, find, search)
    return Page(data=[ExperimentSummary.model_validate(row) for row in rows], has_more=has_more)


@router.get("/{experiment_id}")
async def get_experiment(experiment_id: str, session: Session) -> ExperimentView:
    """Get an experiment with the status counts of its runs and its best run."""
    return await _read_view(session, experiment_id)


@router.patch("/{experiment_id}")
async def edit_experiment(experiment_id: str, body: ExperimentEdit, session: Session) -> ExperimentView:
    """Change name, description, tags or the quota of devices (`max_devices`), which null removes."""
    await service.edit_experiment(session, experiment_id, body)
    return await _read_view(session, experiment_id)


@router.delete(
    "/{experiment_id}",
    status_code=204,
    responses={409: {"description": "It has runs and `cascade` is not set, or one of its runs cannot be deleted."}},
)
async def delete_experiment(
    experiment_id: str,
    request: Request,
    session: Session,
    after_commit: BackgroundTasks,
    cascade: Annotated[
        bool, Query(description="Also delete its runs with their events, checkpoints and models.")
    ] = False,
) -> None:
    """Delete an experiment. One that has runs is refused, unless `cascade` is set."""
    await service.remove_experiment(session, experiment_id, cascade=cascade)
    after_commit.add_task(deletion.delete_remaining_data, request.app.state.sessions, request.app.state.storage)


async def _read_view(session: Session, experiment_id: str) -> ExperimentView:
    experiment = await service.get_experiment(session, experiment_id)
    return ExperimentView(
        **ExperimentSummary.model_validate(experiment).model_dump(),
        **dict(await service.count_contents(session, experiment_id)),
        best_runs=await service.best_runs(session, experiment_id),
    )
