"""Operations on datasets: store, list, delete, and sweep leftovers."""

import asyncio
import hashlib
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from app.api.errors import ApiError, as_api_error, conflict, not_found
from app.api.idempotency import Idempotency
from app.api.pagination import Paging, fetch_page, found_by, search_condition
from app.audit.log import AuditedCall
from app.datasets.importer import ImportedFile
from app.infra.async_tasks import skipping_errors
from app.infra.db import is_away
from app.infra.files.object_store import PIECE_BYTES, ObjectMissing, ObjectStore, StoredFile, StoreUnavailable
from app.infra.files.verified_reads import CorruptContent
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.tables.administration.installation import Installation, register_installation
from app.tables.base import equals_any
from app.tables.datasets import ORIGINAL_EXTENSION, Dataset, DatasetIdempotencyKey, files_of
from app.tables.runs import Run, RunEvalDataset

log = logging.getLogger(__name__)

EXTENSION = "jsonl"
# Longer than any upload and any clock jump: newer files may belong to an active request.
_ORPHAN_SECONDS = 24 * 3600.0
ASIDE_SECONDS = 30 * 24 * 3600.0
_SWEEP_INTERVAL_SECONDS = 3600.0
_SWEEP_AGAIN_SECONDS = 10.0
_MAX_LISTED_RUNS = 5
_CLAIM_ATTEMPTS = 2
"""Attempts to claim an idempotency key, in case the dataset of a concurrent request is deleted at once."""


class _CreatedConcurrently(Exception):
    """Signal that a concurrent request with the same idempotency key was first."""


async def store_dataset(
    sessions: async_sessionmaker[AsyncSession],
    storage: Storage,
    received: ImportedFile,
    created_by: str,
    idempotency: Idempotency | None = None,
    call: AuditedCall | None = None,
) -> Dataset:
    """Move a received file to its final path, then commit its row, so that a row always has its file.

    The same idempotency key returns the same dataset, also for concurrent requests. Uses its own transaction,
    because the upload held no session.
    """
    if earlier := await _find_earlier(sessions, created_by, idempotency):
        return earlier
    id = new_id("ds")
    await claim_storage(sessions, storage)
    await storage.in_transfer(storage.store_dataset, received.path, id, EXTENSION)
    try:
        if received.original is not None:
            await storage.in_transfer(storage.store_dataset, received.original, id, ORIGINAL_EXTENSION)
        for _ in range(_CLAIM_ATTEMPTS):
            try:
                return await _commit_dataset(sessions, id, received, created_by, idempotency, call)
            except _CreatedConcurrently:
                if earlier := await _find_earlier(sessions, created_by, idempotency):
                    await remove_content(storage, id)
                    return earlier
                # The dataset of the concurrent request was deleted, and its key with it.
        raise conflict(
            "idempotency_key_in_use",
            "Other uploads with this Idempotency-Key were created and deleted meanwhile; send this one again.",
        )
    except Exception as error:
        # If the response to the commit was lost, it may have succeeded; the sweep checks once the database is back.
        if not is_away(error):
            await remove_content(storage, id)
        raise


async def claim_storage(sessions: async_sessionmaker[AsyncSession], storage: Storage) -> None:
    """Mark a new object store as that of this installation, and check that it is no other one.

    If datasets were stored before, a store without the newest one is another one, or a share that is not mounted.

    Raises:
        WrongStore, StoreUnavailable: Nothing may be written there or removed there now.
    """
    objects = storage.objects
    if objects is None:
        return
    async with sessions() as session, session.begin():
        installation = await session.scalar(select(Installation.id))
        if installation is None:
            await session.execute(register_installation())
            installation = await session.scalar(select(Installation.id))
        newest = await session.scalar(select(Dataset.id).order_by(Dataset.id.desc()).limit(1))

    def claim_store(store: ObjectStore, id: str) -> None:
        if newest is None:
            store.mark_root()
        store.claim_for(id, lambda: newest is None or bool(store.list(f"datasets/{newest}")))

    await storage.in_thread(claim_store, objects, str(installation))


async def _commit_dataset(
    sessions: async_sessionmaker[AsyncSession],
    id: str,
    received: ImportedFile,
    created_by: str,
    idempotency: Idempotency | None,
    call: AuditedCall | None,
) -> Dataset:
    dataset = Dataset(
        id=id,
        name=received.name,
        format=received.format,
        extension=EXTENSION,
        rows=received.rows,
        bytes=received.bytes,
        sha256=received.sha256,
        columns=received.columns,
        preview=received.preview,
        source=received.source,
        token_statistics=received.token_statistics,
        created_by=created_by,
    )
    async with sessions() as session, session.begin():
        session.add(dataset)
        await session.flush()
        if idempotency is not None:
            await _claim_idempotency_key(session, id, created_by, idempotency)
        await session.refresh(dataset)
        if call is not None:
            call.write_entry(session, 201, id)
    if call is not None:
        call.is_written = True
    return dataset


async def _claim_idempotency_key(
    session: AsyncSession, dataset_id: str, created_by: str, idempotency: Idempotency
) -> None:
    """Store the idempotency key of the dataset; waits for a concurrent request with the same key."""
    row = {"created_by": created_by, "idempotency_key": idempotency.key, "request_digest": idempotency.digest}
    statement = insert(DatasetIdempotencyKey).values(**row, dataset_id=dataset_id).on_conflict_do_nothing()
    if await session.scalar(statement.returning(DatasetIdempotencyKey.dataset_id)) is None:
        raise _CreatedConcurrently


async def _find_earlier(
    sessions: async_sessionmaker[AsyncSession], created_by: str, idempotency: Idempotency | None
) -> Dataset | None:
    """Return the dataset of an earlier request with this key; raises a 422 error if that request was different."""
    if idempotency is None:
        return None
    async with sessions() as session:
        key = await session.get(DatasetIdempotencyKey, (created_by, idempotency.key))
        if key is None:
            return None
        if key.request_digest != idempotency.digest:
            raise ApiError(
                422,
                "idempotency_key_reused",
                f"This Idempotency-Key was used for another upload, which created {key.dataset_id}; use a new key "
                "for a new upload.",
            )
        return await session.get(Dataset, key.dataset_id)


async def get_dataset(session: AsyncSession, dataset_id: str) -> Dataset:
    """Return the dataset; raises `dataset_not_found` if it does not exist."""
    dataset = await session.get(Dataset, dataset_id)
    if dataset is None:
        raise not_found("dataset", dataset_id)
    return dataset


@dataclass(frozen=True)
class Filters:
    """Filters for the list of datasets; None matches all."""

    format: str | None = None
    find: str | None = None
    search: str | None = None
    file_sha256: str | None = None


async def list_datasets(session: AsyncSession, filters: Filters, paging: Paging) -> tuple[list[Dataset], bool]:
    """Return one page of datasets, newest first, and True if there are more."""
    query = select(Dataset)
    if filters.format is not None:
        query = query.where(Dataset.format == filters.format)
    if filters.find is not None:
        query = query.where(found_by(filters.find, "ds", Dataset.id, Dataset.name))
    if filters.search is not None:
        query = query.where(search_condition(filters.search, "ds", Dataset.id, Dataset.name))
    if filters.file_sha256 is not None:
        query = query.where(Dataset.source["sha256"].astext == filters.file_sha256)
    return await fetch_page(session, query, Dataset.id, paging)


async def delete_dataset(session: AsyncSession, dataset_id: str) -> None:
    """Delete the row; raises a 409 error while a run refers to it.

    The caller removes the file after the commit; if that fails, the sweep finds it.
    """
    # The creation of a run locks this row until the run is visible.
    dataset = await session.scalar(select(Dataset).where(Dataset.id == dataset_id).with_for_update())
    if dataset is None:
        raise not_found("dataset", dataset_id)
    evaluating = select(RunEvalDataset.run_id).where(RunEvalDataset.dataset_id == dataset_id)
    uses = or_(Run.dataset_id == dataset_id, Run.eval_dataset_id == dataset_id, Run.id.in_(evaluating))
    query = select(Run.id, Run.status).where(uses).order_by(Run.id.desc()).limit(_MAX_LISTED_RUNS + 1)
    runs = (await session.execute(query)).all()
    if runs:
        named = ", ".join(f"{run.id} ({run.status})" for run in runs[:_MAX_LISTED_RUNS])
        more = " and more" if len(runs) > _MAX_LISTED_RUNS else ""
        raise conflict(
            "dataset_in_use",
            f"Dataset {dataset_id} is used by {named}{more}, for training or a later resume; delete these runs first.",
        )
    await session.delete(dataset)


def as_uploaded(dataset: Dataset) -> Dataset:
    """Return a dataset whose file is the uploaded one: this one, or a copy that is not in the database."""
    *_, uploaded = files_of(dataset)
    if uploaded.extension == dataset.extension:
        return dataset
    return Dataset(id=dataset.id, name=dataset.name, created_at=dataset.created_at, **uploaded._asdict())


async def remove_content(storage: Storage, dataset_id: str) -> None:
    """Remove the files of a deleted dataset; those that cannot be removed now are left to the sweep."""
    with suppress(StoreUnavailable):
        await storage.in_transfer(storage.remove_dataset, dataset_id)


def open_content(storage: Storage, dataset: Dataset) -> BinaryIO | StoredFile:
    """Open the file of a dataset; raises 404 if it is missing from the storage, 409 if that has another one."""
    try:
        file = storage.open_dataset(dataset.id, dataset.extension)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ApiError(
            404,
            "content_missing",
            f"The file of dataset {dataset.id} is missing from the storage; upload it again, or restore the storage.",
        ) from None
    if isinstance(file, StoredFile) and file.size != dataset.bytes:
        file.close()
        raise corrupt_error(dataset)
    return file


async def open_verified(storage: Storage, dataset: Dataset) -> BinaryIO:
    """Open the file of a dataset, of which only what was stored can be read; one on this machine is not compared.

    Reading raises `CorruptContent` and `StoreUnavailable`.

    Raises:
        ApiError: 404 if the file is missing, 409 if it is not what was stored.
        StoreUnavailable: The object store does not answer, or the comparison takes long.
    """
    file = await storage.in_thread(open_content, storage, dataset)
    if not isinstance(file, StoredFile):
        return file
    try:
        return await storage.verified_reads.open_verified(file, dataset.sha256)
    except (CorruptContent, ObjectMissing):
        raise corrupt_error(dataset) from None


def corrupt_error(dataset: Dataset) -> ApiError:
    """Create the 409 error of a dataset whose file is not what was stored."""
    return conflict(
        "content_corrupt",
        f"The file of dataset {dataset.id} in the storage is not what was stored; upload it again, or restore the "
        "storage.",
    )


def local_content(storage: Storage, dataset: Dataset, folder: Path) -> Path:
    """Return the file of a dataset on this machine, copied into `folder` from an object store.

    Raises:
        ApiError: 404 if the file is missing, 409 if it is not what was stored.
        OSError: It does not fit on the disk.
    """
    with open_content(storage, dataset) as file:
        if not isinstance(file, StoredFile):
            return storage.dataset_file(dataset.id, dataset.extension)
        copy = folder / f"{dataset.id}.{dataset.extension}"
        digest, taken = hashlib.sha256(), 0
        with copy.open("wb") as target:
            while taken <= dataset.bytes and (piece := file.read(PIECE_BYTES)):
                digest.update(piece)
                taken += target.write(piece)
    if digest.hexdigest() != dataset.sha256:
        raise corrupt_error(dataset)
    return copy


def file_name(dataset: Dataset) -> str:
    """Return the file name for downloads: the dataset's name with the stored file's extension."""
    if dataset.extension == ORIGINAL_EXTENSION:
        return dataset.name.replace("/", "_")
    stem = Path(dataset.name.replace("/", "_").removesuffix(".gz")).stem or "data"
    return f"{stem}.{dataset.extension}"


async def sweep_orphans(
    sessions: async_sessionmaker[AsyncSession], storage: Storage, older_than_seconds: float = _ORPHAN_SECONDS
) -> int:
    """Remove the files of uploads that never became a dataset; return the number of removed folders.

    Files of a dataset that the database does not know could be the only copy, for example after the database was
    restored from a backup or recreated. They are moved to the `aside` folder for a month.
    """
    removed = await asyncio.to_thread(storage.sweep_staging, older_than_seconds)
    # Otherwise all datasets of another installation would be put aside, and deleted later.
    await claim_storage(sessions, storage)
    await storage.in_transfer(storage.sweep_aside, ASIDE_SECONDS)
    stored = await storage.in_transfer(storage.dataset_ids, older_than_seconds)
    if stored:
        listed = equals_any(Dataset.id, stored)
        async with sessions() as session:
            known = set((await session.scalars(select(Dataset.id).where(listed))).all())
        for id in set(stored) - known:
            with skipping_errors(log, "cannot put the files of dataset %s aside", id):
                folder = await storage.in_transfer(storage.put_dataset_aside, id)
                log.warning(
                    "dataset %s is not in the database; its files were moved to %s and are kept for %d days",
                    id,
                    folder,
                    ASIDE_SECONDS // 86_400,
                )
                removed += 1
    return removed


def sweep_in_background(sessions: async_sessionmaker[AsyncSession], storage: Storage) -> asyncio.Task[None]:
    """Start a task that sweeps now and every hour, until cancelled; after an error, it tries again sooner."""

    async def sweep_periodically() -> None:
        while True:
            pause = _SWEEP_INTERVAL_SECONDS
            try:
                removed = await sweep_orphans(sessions, storage)
                if removed:
                    log.info("removed the leftovers of %d unfinished uploads", removed)
            except Exception as error:
                if as_api_error(error) is None:
                    log.exception("sweeping unfinished uploads failed")
                else:
                    log.warning("unfinished uploads cannot be swept now: %s", error)
                    pause = _SWEEP_AGAIN_SECONDS
            await asyncio.sleep(pause)

    return asyncio.create_task(sweep_periodically(), name="sweep")
