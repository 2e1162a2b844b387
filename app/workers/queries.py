"""Queries for the workers and devices that are online."""

from collections.abc import Collection

from sqlalchemy import ColumnExpressionArgument, TextClause, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from app.config import Settings
from app.contracts.backends import BackendRules
from app.contracts.training_config.rules import DeviceCapabilities
from app.tables.workers import Device, Worker

_FRESH_LEASES = 3

IS_FRESH = "workers.heartbeat_at > clock_timestamp() - make_interval(secs => :silence)"
"""SQL condition: the worker has sent a heartbeat recently enough to count as present; see `silence_seconds`."""


def silence_seconds(lease_seconds: float) -> float:
    """Return the seconds without a heartbeat after which a worker counts as offline."""
    return _FRESH_LEASES * lease_seconds


def is_fresh(lease_seconds: float) -> TextClause:
    """Return the condition `IS_FRESH` for queries on `Worker`."""
    return text(IS_FRESH).bindparams(silence=silence_seconds(lease_seconds))


def online(settings: Settings, backend: str) -> tuple[ColumnExpressionArgument[bool], ...]:
    """Return the conditions on `Worker` for those that claim runs of this backend now."""
    return (Worker.state == "online", is_fresh(settings.lease_seconds), Worker.backends.contains([backend]))


async def online_machines(
    session: AsyncSession, settings: Settings, backend: str, rules: BackendRules | None
) -> list[DeviceCapabilities]:
    """Return the kinds of devices of a backend's online workers, best first; none if they do not matter."""
    if rules is None or not rules.machine_matters or rules.starts_workers:  # a cluster has others than those in use
        return []
    query = select(Device.kind).distinct().join(Worker, Worker.id == Device.worker_id)
    kinds = (await session.scalars(query.where(*online(settings, backend)))).all()
    # The features of a GPU are known only on its worker; here all are assumed to be present.
    return [
        DeviceCapabilities(kind="cuda", bf16=True, flash_attention=True, flash_attention_3=True)
        if kind == "cuda"
        else DeviceCapabilities(kind="cpu")
        for kind in sorted(kinds, reverse=True)
    ]


async def most_devices(session: AsyncSession, settings: Settings, backend: str) -> int | None:
    """Return the largest number of devices of one online worker of a backend; None if none is online."""
    count = func.count().label("count")
    of_each = select(count).select_from(Device).join(Worker, Worker.id == Device.worker_id)
    of_each = of_each.where(*online(settings, backend))
    most: int | None = await session.scalar(select(func.max(of_each.group_by(Worker.id).subquery().c.count)))
    return most


async def device_counts(
    session: AsyncSession,
    settings: Settings,
    backend: str,
    kind: str | None,
    memory_mb: int | None,
    labels: Collection[str],
) -> dict[str, int]:
    """Return, by kind, the largest number of devices of one online worker of a backend that meet these conditions."""
    count = func.count().label("count")
    of_each = select(Device.kind, count).join(Worker, Worker.id == Device.worker_id).where(*online(settings, backend))
    if kind is not None:
        of_each = of_each.where(Device.kind == kind)
    if memory_mb is not None:
        of_each = of_each.where(Device.memory_mb >= memory_mb)
    if labels:
        of_each = of_each.where(Worker.labels.contains(list(labels)))
    each = of_each.group_by(Worker.id, Device.kind).subquery()
    most = await session.execute(select(each.c.kind, func.max(each.c.count).label("most")).group_by(each.c.kind))
    return {row.kind: row.most for row in most}


async def is_any_online(session: AsyncSession, settings: Settings, backend: str) -> bool:
    """Return True if at least one worker claims runs of this backend now."""
    return await session.scalar(select(Worker.id).where(*online(settings, backend)).limit(1)) is not None
