"""What can be done with data sets."""

import asyncio
import logging

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from app.datasets.models import Dataset
from app.datasets.upload import Received
from app.errors import as_api_error, is_database_away, not_found
from app.ids import new_id
from app.pagination import Paging, fetch
from app.storage import Storage

log = logging.getLogger(__name__)

EXTENSION = "jsonl"
# Longer than any upload takes and than a clock may jump: what is younger may belong to a live request.
_ORPHAN_SECONDS = 24 * 3600.0
_SWEEP_EVERY = 3600.0


async def keep(
    sessions: async_sessionmaker[AsyncSession], storage: Storage, received: Received, created_by: str | None
) -> Dataset:
    """Move a received file to its place and commit its row, in this order: a row always has its file.

    The upload held no session while it ran, so this is a transaction of its own.
    """
    dataset = Dataset(
        id=new_id("ds"),
        name=received.name,
        format=received.format,
        extension=EXTENSION,
        rows=received.rows,
        bytes=received.bytes,
        sha256=received.sha256,
        columns=received.columns,
        preview=received.preview,
        created_by=created_by,
    )
    id = dataset.id
    await asyncio.to_thread(storage.promote, received.path, storage.dataset_file(id, EXTENSION))
    try:
        async with sessions() as session, session.begin():
            session.add(dataset)
            await session.flush()
            await session.refresh(dataset)
    except Exception as error:
        # A commit whose answer got lost may have happened: only the sweep can tell, once the database is back.
        if not is_database_away(error):
            await asyncio.to_thread(storage.remove_dataset, id)
        raise
    return dataset


async def get(session: AsyncSession, dataset_id: str) -> Dataset:
    """The data set; `dataset_not_found` where there is none."""
    dataset = await session.get(Dataset, dataset_id)
    if dataset is None:
        raise not_found("dataset", dataset_id)
    return dataset


async def page(session: AsyncSession, paging: Paging) -> tuple[list[Dataset], bool]:
    """Data sets, newest first."""
    return await fetch(session, select(Dataset), Dataset.id, paging)


async def sweep(
    sessions: async_sessionmaker[AsyncSession], storage: Storage, older_than_seconds: float = _ORPHAN_SECONDS
) -> int:
    """Remove what uploads left that never became a data set; answers how many files."""
    removed = await asyncio.to_thread(storage.sweep_staging, older_than_seconds)
    stored = await asyncio.to_thread(storage.dataset_ids, older_than_seconds)
    if stored:
        async with sessions() as session:
            known = set((await session.scalars(select(Dataset.id).where(Dataset.id.in_(stored)))).all())
        for id in set(stored) - known:
            await asyncio.to_thread(storage.remove_dataset, id)
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
