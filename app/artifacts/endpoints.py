"""`/v1/runs/{run_id}/artifacts`."""

import asyncio

from fastapi import APIRouter
from starlette.responses import FileResponse

from app.artifacts import service
from app.artifacts.schemas import Artifacts
from app.dependencies import CurrentStorage, Session

router = APIRouter(prefix="/runs/{run_id}/artifacts", tags=["artifacts"])


@router.get("")
async def list_artifacts(run_id: str, session: Session, storage: CurrentStorage) -> Artifacts:
    """The files of the fine-tuned model: weights, tokenizer, card, metrics."""
    folder = await service.output_folder(session, storage, run_id)
    return Artifacts(data=await asyncio.to_thread(service.listed, folder))


@router.get(
    "/{path:path}",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The ranges that `Range` asked for."},
        416: {"description": "`Range` lies behind the end of the file."},
    },
)
async def download_artifact(run_id: str, path: str, session: Session, storage: CurrentStorage) -> FileResponse:
    """One file, whole or the ranges asked for."""
    folder = await service.output_folder(session, storage, run_id)
    file = await asyncio.to_thread(service.find, storage, folder, path)
    return FileResponse(
        file,
        media_type="application/octet-stream",
        filename=file.name,
        headers={"X-Content-Type-Options": "nosniff", "Cache-Control": "private, no-store"},
    )
