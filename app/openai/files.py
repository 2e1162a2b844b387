"""`/openai/v1/files`: datasets as OpenAI's clients upload, list and download files."""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, BackgroundTasks, Query, Request, Response
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import FileResponse

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.openai.files import UPLOAD_BODY, FileDeleted, FileObject
from anneal.contracts.schemas.openai.lists import ListPage
from app.api.authorization import CurrentCaller
from app.api.dependencies import CurrentSettings, CurrentStorage, Reading, Session, release_connection
from app.api.errors import ApiError, conflict, invalid, to_printable
from app.api.idempotency import Idempotency
from app.api.open_responses import DownloadLimit
from app.audit.log import call_of
from app.datasets import service
from app.datasets.content_response import content_response
from app.datasets.upload import UploadForm, receive_upload
from app.openai.ids import job_of_result_file, to_native_id, to_openai_id
from app.openai.jobs.reading import find_job
from app.openai.jobs.results import read_result_file
from app.openai.retries import find_idempotency, is_retry
from app.tables.datasets import Dataset, files_of

router = APIRouter(prefix="/files")

_PURPOSE = "fine-tune"
_FORM = UploadForm(fields=("purpose",), required={"purpose": _PURPOSE}, keeps_original=True)
_CALL = "/openai/v1/files"


@router.post(
    "",
    openapi_extra={"requestBody": UPLOAD_BODY},
    responses={415: {"description": "The body is not multipart/form-data."}},
)
async def upload_file(
    request: Request,
    response: Response,
    caller: CurrentCaller,
    settings: CurrentSettings,
    storage: CurrentStorage,
    after_response: BackgroundTasks,
) -> FileObject:
    """Upload a file of rows to train or evaluate on. It is stored as a dataset only if every row is valid."""
    began = time.monotonic()
    sessions, content_type = request.app.state.sessions, request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        detail = "Send the file as multipart/form-data with the parts `purpose` and `file`."
        raise ApiError(415, "unsupported_media_type", detail)
    # Rejects an invalid key before the file is read.
    Idempotency.from_header(request.headers.get("idempotency-key"), "", b"")
    with storage.staging_folder() as folder:
        received = await receive_upload(content_type, request.stream(), folder, settings, None, _FORM)
        content, body_seconds = received.digest.encode(), time.monotonic() - began
        idempotency = await find_idempotency(request, caller.key_id, _CALL, content, after_response, body_seconds)
        dataset = await service.store_dataset(
            sessions, storage, received, caller.key_id, idempotency, call_of(request.scope)
        )
    response.headers["Location"] = f"{_CALL}/{to_openai_id(dataset.id)}"
    return _file_object(dataset)


@router.get("", response_model=ListPage[FileObject])
async def list_files(
    session: Reading,
    purpose: Annotated[str | None, Query(max_length=100, description="Only files with this purpose.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Maximum number of files.")] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")] = "desc",
    after: Annotated[str | None, Query(description="ID of the last file of the previous page.")] = None,
) -> Response:
    """List files: all datasets, without the result files of jobs."""
    if purpose not in (None, _PURPOSE):
        return _page_response([], 0)
    # Not the preview, which may be large.
    columns = Dataset.__table__.c["id", "name", "created_at", "extension", "bytes", "sha256", "source"]
    query = select(*columns).order_by(Dataset.id.asc() if order == "asc" else Dataset.id.desc()).limit(limit + 1)
    if after is not None:
        last = to_native_id(after, "ds")
        if last is None:
            raise invalid([FieldError(field="after", code="not_an_id", message="must be the ID of a file")])
        query = query.where(Dataset.id > last if order == "asc" else Dataset.id < last)
    rows = (await session.execute(query)).all()
    await release_connection(session)
    # In a thread: ten thousand files take tenths of a second, which must not block other requests.
    return await asyncio.to_thread(_page_response, rows, limit)


@router.get("/{file_id}")
async def get_file(file_id: str, request: Request, session: Session) -> FileObject:
    """Get a file."""
    if (job_id := job_of_result_file(file_id)) is not None:
        file, _ = await read_result_file(session, request.app.state.curve_reads, job_id)
        return file
    return _file_object(await find_file(session, file_id))


@router.delete("/{file_id}", responses={409: {"description": "Runs refer to it; the message names them."}})
async def delete_file(
    file_id: str, request: Request, session: Session, storage: CurrentStorage, after_commit: BackgroundTasks
) -> FileDeleted:
    """Delete a file, unless a job or another run refers to it, because it can be resumed."""
    if (job_id := job_of_result_file(file_id)) is not None:
        await find_job(session, job_id)
        detail = f"File {file_id} has the metrics of job {job_id}: it is deleted with the runs of the job."
        raise conflict("file_is_of_job", detail)
    try:
        dataset = await find_file(session, file_id)
        await service.delete_dataset(session, dataset.id)
    except ApiError as error:
        if error.status != 404 or not is_retry(request):
            raise
    else:  # otherwise the first attempt has deleted it, and its response was lost
        after_commit.add_task(service.remove_content, storage, dataset.id)
    return FileDeleted(id=file_id)


@router.get(
    "/{file_id}/content",
    response_class=FileResponse,
    dependencies=[DownloadLimit],
    responses={
        200: {
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                "text/csv": {"schema": {"type": "string"}},
            }
        },
        206: {"description": "The ranges that `Range` asked for."},
        409: {"description": "The file in the storage is not what was stored."},
        416: {"description": "`Range` starts after the end of the file."},
    },
)
async def download_file(file_id: str, request: Request, session: Session, storage: CurrentStorage) -> Response:
    """Download a file byte for byte as it was uploaded; of a dataset of `/v1/datasets`, its rows as JSONL.

    A file of `result_files` has the metrics of the steps of a job, as CSV.
    """
    if (job_id := job_of_result_file(file_id)) is not None:
        file, content = await read_result_file(session, request.app.state.curve_reads, job_id)
        name = {"Content-Disposition": f'attachment; filename="{file.filename}"'}
        return Response(content, media_type="text/csv", headers=name)
    dataset = await find_file(session, file_id)
    await release_connection(session)
    return await content_response(storage, service.as_uploaded(dataset), "application/octet-stream")


async def find_file(session: AsyncSession, file_id: str) -> Dataset:
    """Return the dataset of a file; raise `file_not_found` if there is none."""
    id = to_native_id(file_id, "ds")
    dataset = await session.get(Dataset, id) if id is not None else None
    if dataset is None:
        there_is_none = f"There is no file {to_printable(file_id, 60)}; `GET /openai/v1/files` lists the existing ones."
        raise ApiError(404, "file_not_found", there_is_none)
    return dataset


def _page_response(rows: Sequence[Any], limit: int) -> Response:
    page = ListPage[FileObject].from_items([_file_object(row) for row in rows[:limit]], has_more=len(rows) > limit)
    return Response(page.model_dump_json(), media_type="application/json")


def _file_object(dataset: Any) -> FileObject:
    *_, uploaded = files_of(dataset)
    created = int(dataset.created_at.timestamp())
    return FileObject(id=to_openai_id(dataset.id), bytes=uploaded.bytes, created_at=created, filename=dataset.name)
