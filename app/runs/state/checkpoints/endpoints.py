"""Endpoints `/v1/runs/{id}/checkpoints`."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.responses import StreamingResponse

from anneal.contracts.schemas.checkpoints import CheckpointEdit, CheckpointRead
from anneal.contracts.schemas.page import Page
from app.api.dependencies import CurrentStorage, Session, release_connection
from app.api.open_responses import DownloadLimit
from app.api.pagination import PageQuery
from app.runs.state.artifacts.archive import tar_response
from app.runs.state.artifacts.service import checkpoint_folder
from app.runs.state.checkpoints import service
from app.runs.state.service import get_run as get_run
from app.tables.checkpoints import Checkpoint

router = APIRouter(prefix="/runs/{run_id}/checkpoints", tags=["checkpoints"])


@router.get("")
async def list_checkpoints(run_id: str, session: Session, paging: PageQuery) -> Page[CheckpointRead]:
    """List checkpoints whose files exist, newest first."""
    run = await get_run(session, run_id)
    rows, has_more = await service.list_checkpoints(session, run.id, paging)
    return Page(data=await _mark_best(session, run.id, rows), has_more=has_more)


@router.get("/{checkpoint_id}")
async def get_checkpoint(run_id: str, checkpoint_id: str, session: Session) -> CheckpointRead:
    """Get a checkpoint."""
    run = await get_run(session, run_id)
    (response,) = await _mark_best(session, run.id, [await service.get_checkpoint(session, run.id, checkpoint_id)])
    return response


@router.patch("/{checkpoint_id}")
async def edit_checkpoint(run_id: str, checkpoint_id: str, body: CheckpointEdit, session: Session) -> CheckpointRead:
    """Pin or unpin a checkpoint."""
    run = await get_run(session, run_id)
    (response,) = await _mark_best(
        session, run.id, [await service.pin_checkpoint(session, run.id, checkpoint_id, body.pinned)]
    )
    return response


@router.get(
    "/{checkpoint_id}/download",
    response_class=StreamingResponse,
    dependencies=[DownloadLimit],
    responses={200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def download_checkpoint(
    run_id: str, checkpoint_id: str, session: Session, storage: CurrentStorage
) -> StreamingResponse:
    """Download the files of a checkpoint in one tar archive, generated while it is sent."""
    run = await get_run(session, run_id)
    checkpoint = await service.get_checkpoint(session, run.id, checkpoint_id)
    folder = checkpoint_folder(storage, checkpoint)
    await release_connection(session)
    return await tar_response(storage, folder, checkpoint.id)


async def _mark_best(session: Session, run_id: str, rows: Sequence[Checkpoint]) -> list[CheckpointRead]:
    best = await service.best_good(session, run_id)
    return [CheckpointRead.model_validate(row).model_copy(update={"is_best": row is best}) for row in rows]
