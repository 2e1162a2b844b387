"""Endpoints `/v1/runs/{run_id}/artifacts` and `artifacts.tar`."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import FileResponse, StreamingResponse

from anneal.contracts.schemas.artifacts import Artifacts
from app.api.dependencies import CurrentStorage, Session, release_connection
from app.api.open_responses import DownloadLimit
from app.runs.state.artifacts import service
from app.runs.state.artifacts.archive import tar_response

router = APIRouter(prefix="/runs/{run_id}", tags=["artifacts"])

_MANY: dict[int | str, dict[str, Any]] = {409: {"description": "There are too many files to list."}}

_FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
    206: {"description": "The ranges requested with `Range`."},
    416: {"description": "`Range` starts after the end of the file."},
}


@router.get("/artifacts", responses=_MANY)
async def list_artifacts(run_id: str, session: Session, storage: CurrentStorage) -> Artifacts:
    """List the files of the fine-tuned model: weights, tokenizer, model card, metrics."""
    folder = await service.output_folder(session, storage, run_id)
    await release_connection(session)
    return await storage.in_thread(service.list_artifacts, folder)


@router.get(
    "/artifacts.tar",
    response_class=StreamingResponse,
    dependencies=[DownloadLimit],
    responses={200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}, **_MANY},
)
async def download_artifacts(run_id: str, session: Session, storage: CurrentStorage) -> StreamingResponse:
    """Download all files in one tar archive, generated while it is sent: `curl … | tar x`."""
    folder = await service.output_folder(session, storage, run_id)
    await release_connection(session)
    return await tar_response(storage, folder, run_id)


@router.get("/artifacts/{path:path}", response_class=FileResponse, dependencies=[DownloadLimit], responses=_FILE)
async def download_artifact(run_id: str, path: str, session: Session, storage: CurrentStorage) -> FileResponse:
    """Download one file, whole or the requested ranges."""
    folder = await service.output_folder(session, storage, run_id)
    await release_connection(session)
    return await storage.in_thread(folder.file_response, path)


@router.get("/attempts/{attempt}/artifacts", responses=_MANY)
async def list_attempt_artifacts(run_id: str, attempt: int, session: Session, storage: CurrentStorage) -> Artifacts:
    """List the records of an attempt, however it ended: metrics, memory profile, distributions, TensorBoard files."""
    folder = await service.attempt_folder(session, storage, run_id, attempt)
    await release_connection(session)
    return await storage.in_thread(service.list_artifacts, folder)


@router.get(
    "/attempts/{attempt}/artifacts/{path:path}",
    response_class=FileResponse,
    dependencies=[DownloadLimit],
    responses=_FILE,
)
async def download_attempt_artifact(
    run_id: str, attempt: int, path: str, session: Session, storage: CurrentStorage
) -> FileResponse:
    """Download one record of an attempt, whole or the requested ranges."""
    folder = await service.attempt_folder(session, storage, run_id, attempt)
    await release_connection(session)
    return await storage.in_thread(folder.file_response, path)
