"""`/v1/datasets`."""

from fastapi import APIRouter, Request, Response

from app.auth import CurrentCaller
from app.datasets import service, upload
from app.datasets.schemas import UPLOAD_BODY, DatasetSummary, DatasetView
from app.dependencies import CurrentSettings, CurrentStorage, Session
from app.pagination import Page, PageQuery

router = APIRouter(prefix="/datasets", tags=["datasets"])


@router.post(
    "",
    status_code=201,
    openapi_extra={"requestBody": UPLOAD_BODY},
    responses={415: {"description": "The body is not multipart/form-data."}},
)
async def upload_dataset(
    request: Request,
    response: Response,
    caller: CurrentCaller,
    settings: CurrentSettings,
    storage: CurrentStorage,
) -> DatasetView:
    """Upload a JSONL file; it is checked row by row, and kept only when every row is good."""
    content_type = request.headers.get("content-type", "")
    with storage.staging() as folder:
        received = await upload.receive(content_type, request.stream(), folder, settings)
        dataset = await service.keep(request.app.state.sessions, storage, received, caller.key_id)
    response.headers["Location"] = f"/v1/datasets/{dataset.id}"
    return DatasetView.model_validate(dataset)


@router.get("")
async def list_datasets(session: Session, paging: PageQuery) -> Page[DatasetSummary]:
    """Data sets, newest first."""
    rows, has_more = await service.page(session, paging)
    return Page(data=[DatasetSummary.model_validate(row) for row in rows], has_more=has_more)


@router.get("/{dataset_id}")
async def get_dataset(dataset_id: str, session: Session) -> DatasetView:
    """One data set with its first rows."""
    return DatasetView.model_validate(await service.get(session, dataset_id))
