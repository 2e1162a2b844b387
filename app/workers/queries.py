"""Queries for the workers and devices that are online."""

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.config import Settings
from app.contracts.backends import BackendRules
from app.contracts.training_config.rules import DeviceCapabilities
from app.infra.db import seconds
from app.tables.workers import Device, Worker

FRESH_LEASES = 3
"""Lease times without a heartbeat after which a worker counts as offline."""


async def online_machines(
    session: AsyncSession, settings: Settings, backend: str, rules: BackendRules | None
) -> list[DeviceCapabilities]:
    """Return the kinds of devices of a backend's online workers, best first; none if devices do not matter."""
    if rules is None or not rules.machine_matters:
        return []
    query = select(Device.kind).distinct().join(Worker, Worker.id == Device.worker_id)
    kinds = (await session.scalars(query.where(*_online(settings, backend)))).all()
    # The features of a GPU are known only on its worker; here all are assumed to be present.
    return [
        DeviceCapabilities(kind="cuda", bf16=True, flash_attention=True, flash_attention_3=True)
        if kind == "cuda"
        else DeviceCapabilities(kind="cpu")
        for kind in sorted(kinds, reverse=True)
    ]


async def _worker_online(session: AsyncSession, settings: Settings, backend: str) -> bool:
    return await session.scalar(select(Worker.id).where(*_online(settings, backend)).limit(1)) is not None


def _online(settings: Settings, backend: str) -> tuple[Any, ...]:
    fresh = func.clock_timestamp() - seconds(settings.lease_seconds * FRESH_LEASES)
    return (Worker.state == "online", Worker.heartbeat_at > fresh, Worker.backends.contains([backend]))
