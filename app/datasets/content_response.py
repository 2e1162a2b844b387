"""Response with the file of a dataset, for the APIs that send it."""

from starlette.responses import FileResponse

from app.api.file_response import OpenFileResponse, StoredFileResponse
from app.datasets import service
from app.infra.files.object_store import StoredFile
from app.infra.storage import Storage
from app.tables.datasets import Dataset


async def content_response(storage: Storage, dataset: Dataset, media_type: str) -> FileResponse:
    """Return the file of a dataset, completely or the requested ranges; raises 404 if it is missing, 409 if corrupt."""
    file = await storage.in_thread(service.open_content, storage, dataset)
    name = service.file_name(dataset)
    if isinstance(file, StoredFile):
        corrupt, modified = service.corrupt_error(dataset), dataset.created_at.timestamp()
        return StoredFileResponse(
            file, storage, dataset.sha256, corrupt, filename=name, modified=modified, media_type=media_type
        )
    return OpenFileResponse(file, media_type=media_type, filename=name, headers={"ETag": f'"{dataset.sha256}"'})
