"""`/v1/datasets`."""

from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Header, Query, Request, Response
from starlette.responses import FileResponse

from anneal.contracts.field_types import DatasetFormat
from anneal.contracts.schemas.datasets import UPLOAD_BODY, DatasetMix, DatasetRows, DatasetSummary, DatasetView
from anneal.contracts.schemas.page import Page
from app.api.authorization import CurrentCaller
from app.api.dependencies import CurrentSettings, CurrentStorage, Session, release_connection
from app.api.idempotency import Idempotency
from app.api.open_responses import DownloadLimit
from app.api.pagination import FindQuery, PageQuery, SearchQuery
from app.audit.log import call_of
from app.datasets import mix, rows, service, sources
from app.datasets.content_response import content_response
from app.infra.files.object_store import ObjectMissing
from app.infra.files.verified_reads import CorruptContent

router = APIRouter(prefix="/datasets", tags=["datasets"])

IdempotencyKey = Annotated[
    str | None,
    Header(
        description="Repeating an upload with the same key, file and fields returns the same dataset, so an upload "
        "whose response was lost can be retried safely.",
        examples=["0b5c6f62-41b8-4f5c-9d0e-6a2e8d1c7f30"],
    ),
]


@router.post(
    "",
    status_code=201,
    openapi_extra={"requestBody": UPLOAD_BODY},
    responses={
        415: {"description": "The body is neither multipart/form-data nor JSON."},
        502: {"description": "The hub does not answer, or its response is unusable."},
    },
)
async def upload_dataset(
    request: Request,
    response: Response,
    caller: CurrentCaller,
    settings: CurrentSettings,
    storage: CurrentStorage,
    idempotency_key: IdempotencyKey = None,
) -> DatasetView:
    """Upload a file (JSONL, JSON, CSV, TSV, Parquet), or import a dataset of the Hugging Face Hub named in JSON.

    The dataset is validated row by row and stored as JSONL only if every row is valid.
    """
    sessions = request.app.state.sessions
    Idempotency.from_header(idempotency_key, "", b"")  # rejects an invalid key before the file is read
    with storage.staging_folder() as folder:
        context = sources.ImportContext(sessions, settings, storage, folder)
        received = await sources.receive_dataset(context, request.headers.get("content-type", ""), request.stream())
        idempotency = Idempotency.from_header(idempotency_key, "/v1/datasets", received.digest.encode())
        dataset = await service.store_dataset(
            sessions, storage, received, caller.key_id, idempotency, call_of(request.scope)
        )
    response.headers["Location"] = f"/v1/datasets/{dataset.id}"
    return DatasetView.model_validate(dataset)


@router.post(
    "/mix",
    status_code=201,
    responses={404: {"description": "The file of a source is missing from the storage."}},
)
async def mix_datasets(
    body: DatasetMix,
    request: Request,
    response: Response,
    caller: CurrentCaller,
    settings: CurrentSettings,
    storage: CurrentStorage,
    idempotency_key: IdempotencyKey = None,
) -> DatasetView:
    """Make a dataset of rows of other datasets, in an order that its seed determines.

    With weights, the rows and their order are those of `datasets.interleave_datasets` for the same probabilities, seed
    and stopping strategy.
    """
    sessions = request.app.state.sessions
    Idempotency.from_header(idempotency_key, "", b"")  # rejects an invalid key before anything is written
    with storage.staging_folder() as folder:
        mixed = await mix.write_mix(sessions, settings, storage, folder, body)
        idempotency = Idempotency.from_header(idempotency_key, "/v1/datasets/mix", mixed.digest.encode())
        dataset = await service.store_dataset(
            sessions, storage, mixed, caller.key_id, idempotency, call_of(request.scope)
        )
    response.headers["Location"] = f"/v1/datasets/{dataset.id}"
    return DatasetView.model_validate(dataset)


@router.get("")
async def list_datasets(
    session: Session,
    paging: PageQuery,
    format: DatasetFormat | None = None,
    find: FindQuery = None,
    search: SearchQuery = None,
    file_sha256: Annotated[
        str | None,
        Query(
            pattern="^[0-9a-f]{64}$",
            description="Only datasets of an uploaded file with this SHA-256, in hexadecimal digits.",
        ),
    ] = None,
) -> Page[DatasetSummary]:
    """List datasets, newest first."""
    datasets, has_more = await service.list_datasets(
        session, service.Filters(format, find, search, file_sha256), paging
    )
    return Page(data=[DatasetSummary.model_validate(row) for row in datasets], has_more=has_more)


@router.get("/{dataset_id}")
async def get_dataset(dataset_id: str, session: Session) -> DatasetView:
    """Get one dataset with its first rows."""
    return DatasetView.model_validate(await service.get_dataset(session, dataset_id))


@router.delete(
    "/{dataset_id}",
    status_code=204,
    responses={409: {"description": "Runs refer to it; `detail` names them."}},
)
async def delete_dataset(
    dataset_id: str, session: Session, storage: CurrentStorage, after_commit: BackgroundTasks
) -> None:
    """Delete a dataset and its file, unless a run refers to it, because a finished run can be resumed."""
    await service.delete_dataset(session, dataset_id)
    after_commit.add_task(service.remove_content, storage, dataset_id)


@router.get("/{dataset_id}/rows")
async def list_rows(
    dataset_id: str,
    session: Session,
    storage: CurrentStorage,
    after: Annotated[
        str | None, Query(max_length=40, description="`next` of the page before; absent: from the first row.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=100, description="Maximum number of rows; fewer if they are large.")] = 20,
) -> DatasetRows:
    """Get rows of a dataset, with long texts cut; GET …/content has them whole."""
    dataset = await service.get_dataset(session, dataset_id)
    await release_connection(session)
    file = await service.open_verified(storage, dataset)
    try:
        return await storage.in_thread(rows.read_rows, file, after, limit)
    except (CorruptContent, ObjectMissing):  # it was changed after it was compared
        raise service.corrupt_error(dataset) from None


@router.get(
    "/{dataset_id}/content",
    response_class=FileResponse,
    dependencies=[DownloadLimit],
    responses={
        200: {"content": {"application/x-ndjson": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The ranges that `Range` asked for."},
        416: {"description": "`Range` starts after the end of the file."},
    },
)
async def download_dataset(dataset_id: str, session: Session, storage: CurrentStorage) -> FileResponse:
    """Download the rows as JSONL, completely or the requested ranges; `ETag` is the SHA-256."""
    dataset = await service.get_dataset(session, dataset_id)
    await release_connection(session)
    return await content_response(storage, dataset, "application/x-ndjson")
