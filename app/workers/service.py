"""Queries on workers."""

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.run_status import LIVE
from app.api.pagination import Paging, fetch_page
from app.config import Settings
from app.tables.parts import RunPart
from app.tables.runs import Run
from app.tables.workers import Device, Worker
from app.workers.queries import is_fresh


@dataclass(frozen=True)
class Presence:
    """Worker with its devices and current runs."""

    worker: Worker
    state: str
    devices: list[Device]
    runs: list[str]


async def list_workers(session: AsyncSession, settings: Settings, paging: Paging) -> tuple[list[Presence], bool]:
    """Return a page of workers, newest first; workers that ended or stopped sending heartbeats are `offline`."""
    workers, has_more = await fetch_page(session, select(Worker), Worker.id, paging)
    ids = [worker.id for worker in workers]
    devices: dict[str, list[Device]] = defaultdict(list)
    owned = select(Device).where(Device.worker_id.in_(ids)).order_by(Device.worker_id, Device.index)
    for device in (await session.scalars(owned)).all():
        devices[device.worker_id].append(device)
    runs: dict[str | None, list[str]] = defaultdict(list)
    led = select(Run.lease_owner, Run.id).where(Run.status.in_(LIVE), Run.lease_owner.in_(ids))
    joined = select(RunPart.worker_id, RunPart.run_id).where(RunPart.ended_at.is_(None), RunPart.worker_id.in_(ids))
    held = [*(await session.execute(led)).all(), *(await session.execute(joined)).all()]
    for owner, run_id in sorted({(owner, run_id) for owner, run_id in held}):
        runs[owner].append(run_id)
    present = select(Worker.id).where(Worker.id.in_(ids), is_fresh(settings.lease_seconds))
    fresh = set((await session.scalars(present)).all())
    return [
        Presence(
            worker,
            worker.state if worker.id in fresh else "offline",
            devices[worker.id],
            runs[worker.id],
        )
        for worker in workers
    ], has_more
