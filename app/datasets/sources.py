"""Sources of `POST /v1/datasets`: an uploaded file or a dataset of the hub, optionally with a tokenizer."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.datasets import HubImport
from app.api.errors import ApiError, from_validation, invalid, too_large
from app.base_models import resolver
from app.base_models.model_folder import ModelFolder
from app.config import Settings
from app.datasets import upload
from app.datasets.importer import DatasetImporter, ImportedFile, ImportOptions, in_thread, run_with_slot
from app.datasets.token_counter import MOST_TOKENIZER_BYTES, TokenCounter
from app.infra.files.untrusted_folder import OutsideStorage
from app.infra.storage import Storage
from app.infra.strict_json import BadJson, parse_json
from app.secrets import service as secrets
from app.secrets.store import HF_TOKEN
from app.tables.runs import Run


@dataclass(frozen=True)
class ImportContext:
    """Context of a dataset import."""

    sessions: async_sessionmaker[AsyncSession]
    settings: Settings
    storage: Storage
    folder: Path
    """Folder for temporary files until the dataset is stored."""


async def receive_dataset(context: ImportContext, content_type: str, body: AsyncIterator[bytes]) -> ImportedFile:
    """Import the dataset that a request uploads or names; raises `ApiError` if it is invalid."""
    if content_type.partition(";")[0].strip().lower() == "application/json":
        return await _from_hub(context, await _parse_request(context.settings, body))
    return await upload.receive_upload(
        content_type, body, context.folder, context.settings, partial(_load_tokenizer, context)
    )


async def _parse_request(settings: Settings, body: AsyncIterator[bytes]) -> HubImport:
    raw = bytearray()
    async for piece in body:
        raw += piece
        if len(raw) > settings.max_json_bytes:
            raise too_large("The body of this request", settings.max_json_bytes)
    try:
        return HubImport.model_validate(await asyncio.to_thread(parse_json, bytes(raw)))
    except BadJson as error:
        raise invalid([FieldError(field="", code=error.code, message=error.message)]) from None
    except ValidationError as error:
        raise invalid(from_validation(error.errors())) from None


async def _from_hub(context: ImportContext, request: HubImport) -> ImportedFile:
    if not context.settings.allow_hub:
        message = (
            "this server does not load from the hub; upload the file, or ask the operator to set ANNEAL_ALLOW_HUB=true"
        )
        raise invalid([FieldError(field="hub", code="hub_not_allowed", message=message)], code="hub_not_allowed")
    from app.datasets import hub  # importing its HTTP client takes a tenth of the API's startup time

    columns = upload.validate_column_mapping(request.columns) if request.columns is not None else None
    tokens = await _load_tokenizer(context, request.tokenizer) if request.tokenizer else None
    reading = ImportOptions(request.format, None, columns, tokens)
    receiving = await asyncio.to_thread(DatasetImporter, context.folder, context.settings, reading)
    try:
        async with hub.open_client(await _hub_token(context)) as client:
            files = await hub.files_of_split(client, request)
            for file in files:
                receiving.begin_file(file.path, file.path if len(files) > 1 else "")
                async for piece in hub.download_file(client, file):
                    await in_thread(receiving.feed, piece)
                await in_thread(receiving.end_file)
                while await run_with_slot(receiving.read_more):
                    pass
        name = request.name or f"{request.hub} {request.split}"
        digest = json.dumps(request.model_dump(mode="json"), sort_keys=True)
        return await in_thread(receiving.finish_dataset, name, digest)
    finally:
        receiving.close()
        if tokens is not None:
            tokens.close()


async def _hub_token(context: ImportContext) -> str | None:
    async with context.sessions() as session:
        return await secrets.find_secret(session, context.settings, HF_TOKEN)


async def _load_tokenizer(context: ImportContext, name: str) -> TokenCounter:
    """Load the tokenizer of a local model, a run's output or a hub model; raises a 422 error with the reason."""
    try:
        file = await _tokenizer_file(context, name)
        return await run_with_slot(TokenCounter, name, file, context.settings)
    except resolver.BaseModelError as error:
        raise _no_tokenizer(error.code, error.message) from None


async def _tokenizer_file(context: ImportContext, name: str) -> Path:
    attempt = None
    if resolver.is_run(name):
        async with context.sessions() as session:
            attempt = await session.scalar(select(Run.output_attempt).where(Run.id == name))
    located = await context.storage.in_thread(resolver.locate_model, context.settings, context.storage, name, attempt)
    file = context.folder / "tokenizer.json"
    if located["path"] is None:
        from app.datasets import hub

        async with hub.open_client(await _hub_token(context)) as client:
            await hub.fetch_tokenizer(client, located["hub"] or name, file, MOST_TOKENIZER_BYTES)
        return file
    folder = ModelFolder(context.storage, Path(located["path"]))
    try:
        content = await context.storage.in_thread(folder.read_file, file.name, MOST_TOKENIZER_BYTES)
    except OutsideStorage as error:
        raise _no_tokenizer("bad_tokenizer", f"the tokenizer of {name!r} cannot be used: {error}") from None
    except OSError:
        message = f"the model {name!r} has no tokenizer.json; save a fast tokenizer in its folder"
        raise _no_tokenizer("tokenizer_not_found", message) from None
    await asyncio.to_thread(file.write_bytes, content)
    return file


def _no_tokenizer(code: str, message: str) -> ApiError:
    return invalid([FieldError(field="tokenizer", code=code, message=message)], code=code)
