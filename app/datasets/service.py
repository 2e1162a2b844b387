"""What can be done with data sets."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import ARRAY, Text, any_, literal, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from app.audit.log import Call
from app.datasets.models import Dataset, UploadKey
from app.datasets.receiving import Received
from app.errors import ApiError, as_api_error, conflict, is_database_away, not_found
from app.ids import new_id
from app.pagination import Paging, fetch
from app.runs.models import Run
from app.runs.service import Idempotency
from app.storage import Storage

log = logging.getLogger(__name__)

EXTENSION = "jsonl"
# Longer than any upload takes and than a clock may jump: what is younger may belong to a live request.
_ORPHAN_SECONDS = 24 * 3600.0
ASIDE_SECONDS = 30 * 24 * 3600.0
_SWEEP_EVERY = 3600.0
_RUNS_TOLD = 5
_TRIES = 2
"""To claim a key, where what a twin made with it is deleted at once."""


class _MadeByATwin(Exception):
    """Another request with the same key was first."""


async def keep(
    sessions: async_sessionmaker[AsyncSession],
    storage: Storage,
    received: Received,
    created_by: str,
    idempotency: Idempotency | None = None,
    call: Call | None = None,
) -> Dataset:
    """Move a received file to its place and commit its row, in this order: a row always has its file.

    The same idempotency key answers the same data set, also to two requests at once. The upload held no session
    while it ran, so this is a transaction of its own.
    """
    if earlier := await _replayed(sessions, created_by, idempotency):
        return earlier
    id = new_id("ds")
    await asyncio.to_thread(storage.promote, received.path, storage.dataset_file(id, EXTENSION))
    try:
        for _ in range(_TRIES):
            try:
                return await _commit(sessions, id, received, created_by, idempotency, call)
            except _MadeByATwin:
                if earlier := await _replayed(sessions, created_by, idempotency):
                    await asyncio.to_thread(storage.remove_dataset, id)
                    return earlier
                # Somebody has deleted what the twin made, and the key with it.
        raise conflict(
            "idempotency_key_in_use",
            "Other uploads with this Idempotency-Key came and were deleted meanwhile; send this one again.",
        )
    except Exception as error:
        # A commit whose answer got lost may have happened: only the sweep can tell, once the database is back.
        if not is_database_away(error):
            await asyncio.to_thread(storage.remove_dataset, id)
        raise


async def _commit(
    sessions: async_sessionmaker[AsyncSession],
    id: str,
    received: Received,
    created_by: str,
    idempotency: Idempotency | None,
    call: Call | None,
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
        token_statistics=received.token_statistics,
        created_by=created_by,
    )
    async with sessions() as session, session.begin():
        session.add(dataset)
        await session.flush()
        if idempotency is not None:
            await _claim(session, id, created_by, idempotency)
        await session.refresh(dataset)
        if call is not None:
            call.write(session, 201, id)
    if call is not None:
        call.is_written = True
    return dataset


async def _claim(session: AsyncSession, dataset_id: str, created_by: str, idempotency: Idempotency) -> None:
    """Tie the key to the data set; waits for a twin that is about to do the same."""
    row = {"created_by": created_by, "idempotency_key": idempotency.key, "request_digest": idempotency.digest}
    statement = insert(UploadKey).values(**row, dataset_id=dataset_id).on_conflict_do_nothing()
    if await session.scalar(statement.returning(UploadKey.dataset_id)) is None:
        raise _MadeByATwin


async def _replayed(
    sessions: async_sessionmaker[AsyncSession], created_by: str, idempotency: Idempotency | None
) -> Dataset | None:
    """The data set that an earlier request with this key made; 422 when that request was another one."""
    if idempotency is None:
        return None
    async with sessions() as session:
        key = await session.get(UploadKey, (created_by, idempotency.key))
        if key is None:
            return None
        if key.request_digest != idempotency.digest:
            raise ApiError(
                422,
                "idempotency_key_reused",
                f"This Idempotency-Key came with another upload before, which made {key.dataset_id}; use a new key "
                "for a new upload.",
            )
        return await session.get(Dataset, key.dataset_id)


async def get(session: AsyncSession, dataset_id: str) -> Dataset:
    """The data set; `dataset_not_found` where there is none."""
    dataset = await session.get(Dataset, dataset_id)
    if dataset is None:
        raise not_found("dataset", dataset_id)
    return dataset


@dataclass(frozen=True)
class Filters:
    """Which data sets to list; None: any."""

    name: str | None = None
    format: str | None = None


async def page(session: AsyncSession, filters: Filters, paging: Paging) -> tuple[list[Dataset], bool]:
    """Data sets, newest first."""
    query = select(Dataset)
    if filters.name is not None:
        query = query.where(Dataset.name.icontains(filters.name, autoescape=True))
    if filters.format is not None:
        query = query.where(Dataset.format == filters.format)
    return await fetch(session, query, Dataset.id, paging)


async def delete(session: AsyncSession, dataset_id: str) -> None:
    """Remove the row; 409 while a run refers to it. Its file goes after the commit, else the sweep finds it."""
    # A run that is being made holds this row until it is there to be seen.
    dataset = await session.scalar(select(Dataset).where(Dataset.id == dataset_id).with_for_update())
    if dataset is None:
        raise not_found("dataset", dataset_id)
    uses = or_(Run.dataset_id == dataset_id, Run.eval_dataset_id == dataset_id)
    query = select(Run.id, Run.status).where(uses).order_by(Run.id.desc()).limit(_RUNS_TOLD + 1)
    runs = (await session.execute(query)).all()
    if runs:
        named = ", ".join(f"{run.id} ({run.status})" for run in runs[:_RUNS_TOLD])
        more = " and more" if len(runs) > _RUNS_TOLD else ""
        raise conflict(
            "dataset_in_use",
            f"Data set {dataset_id} is what {named}{more} trained on or could be resumed with; delete these runs "
            "first.",
        )
    await session.delete(dataset)


def content(storage: Storage, dataset: Dataset) -> Path:
    """The file of a data set; 404 where the storage has lost it."""
    file = storage.dataset_file(dataset.id, dataset.extension)
    if not file.is_file():
        raise ApiError(
            404,
            "content_missing",
            f"The file of data set {dataset.id} is gone from the storage; upload it again, or restore the storage.",
        )
    return file


def file_name(dataset: Dataset) -> str:
    """What to call the file when it is saved: its name, with the ending of what is kept."""
    stem = Path(dataset.name.replace("/", "_")).stem or "data"
    return f"{stem}.{dataset.extension}"


async def sweep(
    sessions: async_sessionmaker[AsyncSession], storage: Storage, older_than_seconds: float = _ORPHAN_SECONDS
) -> int:
    """Remove what uploads left that never became a data set; answers how many files.

    A data set that only this database does not know, an older one or an empty one say, could be all that there is of
    it: its files are put aside for a month.
    """
    removed = await asyncio.to_thread(storage.sweep_staging, older_than_seconds)
    await asyncio.to_thread(storage.sweep_aside, ASIDE_SECONDS)
    stored = await asyncio.to_thread(storage.dataset_ids, older_than_seconds)
    if stored:
        listed = Dataset.id == any_(literal(stored, ARRAY(Text)))
        async with sessions() as session:
            known = set((await session.scalars(select(Dataset.id).where(listed))).all())
        for id in set(stored) - known:
            folder = await asyncio.to_thread(storage.put_dataset_aside, id)
            log.warning(
                "the database knows no data set %s: its files are in %s for %d days",
                id,
                folder,
                ASIDE_SECONDS // 86_400,
            )
            removed += 1
    return removed


def sweep_in_background(sessions: async_sessionmaker[AsyncSession], storage: Storage) -> asyncio.Task[None]:
    """Sweep now and every hour, until cancelled."""

    async def loop() -> None:
        while True:
            try:
                removed = await sweep(sessions, storage)
                if removed:
                    log.info("removed the remains of %d unfinished uploads", removed)
            except Exception as error:
                if as_api_error(error) is None:
                    log.exception("sweeping unfinished uploads failed")
            await asyncio.sleep(_SWEEP_EVERY)

    return asyncio.create_task(loop(), name="sweep")
