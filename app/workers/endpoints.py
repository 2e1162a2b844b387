"""Endpoint `/v1/workers`."""

from fastapi import APIRouter

from anneal.contracts.schemas.page import Page
from anneal.contracts.schemas.workers import DeviceRead, WorkerRead
from app.api.dependencies import CurrentSettings, Session
from app.api.pagination import PageQuery
from app.workers import service

router = APIRouter(prefix="/workers", tags=["workers"])


@router.get("")
async def list_workers(session: Session, settings: CurrentSettings, paging: PageQuery) -> Page[WorkerRead]:
    """List workers with their devices and current runs, newest first."""
    presences, has_more = await service.list_workers(session, settings, paging)
    return Page(data=[_read_worker(presence) for presence in presences], has_more=has_more)


def _read_worker(presence: service.Presence) -> WorkerRead:
    worker = presence.worker
    return WorkerRead(
        id=worker.id,
        host=worker.host,
        pid=worker.pid,
        version=worker.version,
        state=presence.state,
        slots=worker.slots,
        backends=worker.backends,
        labels=worker.labels,
        launch_mode=worker.launch_mode,
        launch_reason=worker.launch_reason,
        plugins=worker.plugins,
        packages=worker.packages,
        joins_hosts=worker.group_address is not None,
        gguf=worker.gguf,
        gguf_quantizer=worker.gguf_quantizer,
        started_at=worker.started_at,
        heartbeat_at=worker.heartbeat_at,
        devices=[DeviceRead.model_validate(device) for device in presence.devices],
        runs=presence.runs,
    )
