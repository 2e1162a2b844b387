"""Queries for the workers and devices that are online."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, ColumnExpressionArgument, TextClause, case, func, literal, select, text, true
from sqlalchemy.ext.asyncio import AsyncSession

from app.config import Settings
from app.contracts.backends import BackendRules
from app.contracts.schemas.runs.placement import name_words
from app.contracts.training_config.rules import DeviceCapabilities
from app.tables.workers import Device, Worker

_FRESH_LEASES = 3
_devices: Any = Device.__table__

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


def has_name(wanted: ColumnElement[Any], name: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a device's name has the wanted words (see `name_words`); true if none are wanted."""
    words = func.concat(" ", func.regexp_replace(func.lower(name), "[^a-z0-9]+", " ", "g"), " ")
    return case((wanted.is_not(None), func.strpos(words, func.concat(" ", wanted, " ")) > 0), else_=true())


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


async def device_counts(
    session: AsyncSession,
    settings: Settings,
    backend: str,
    kind: str | None,
    gpu: str | None,
    memory_mb: int | None,
    labels: Collection[str],
) -> dict[str, int]:
    """Return, by kind, the largest number of devices of one online worker of a backend that meet these conditions."""
    count = func.count().label("count")
    of_each = select(Device.kind, count).join(Worker, Worker.id == Device.worker_id).where(*online(settings, backend))
    if kind is not None:
        of_each = of_each.where(Device.kind == kind)
    if gpu is not None:
        of_each = of_each.where(has_name(literal(name_words(gpu).strip()), _devices.c.name))
    if memory_mb is not None:
        of_each = of_each.where(Device.memory_mb >= memory_mb)
    if labels:
        of_each = of_each.where(Worker.labels.contains(list(labels)))
    each = of_each.group_by(Worker.id, Device.kind).subquery()
    most = await session.execute(select(each.c.kind, func.max(each.c.count).label("most")).group_by(each.c.kind))
    return {row.kind: row.most for row in most}


async def gpu_names(session: AsyncSession, settings: Settings, backend: str) -> list[str]:
    """Return the names of the GPUs of online workers of a backend."""
    query = select(Device.name).distinct().join(Worker, Worker.id == Device.worker_id)
    names = await session.scalars(query.where(Device.kind == "cuda", *online(settings, backend)).order_by(Device.name))
    return list(names.all())


async def is_any_online(session: AsyncSession, settings: Settings, backend: str) -> bool:
    """Return True if at least one worker claims runs of this backend now."""
    return await session.scalar(select(Worker.id).where(*online(settings, backend)).limit(1)) is not None
