"""Queries for the workers and devices that are online."""

from typing import Any

from sqlalchemy import ColumnElement, ColumnExpressionArgument, TextClause, case, func, literal, select, text, true
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BackendRules
from anneal.contracts.schemas.runs.placement import Placement, name_words
from anneal.contracts.training_config.rules import DeviceCapabilities
from app.config import Settings
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


def online_conditions(settings: Settings, backend: str) -> tuple[ColumnExpressionArgument[bool], ...]:
    """Return the conditions on `Worker` for those that claim runs of this backend now."""
    return (Worker.state == "online", is_fresh(settings.lease_seconds), Worker.backends.contains([backend]))


def has_name(required_words: ColumnElement[Any], name: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a device's name has the wanted words (see `name_words`); true if none are wanted."""
    words = func.concat(" ", func.regexp_replace(func.lower(name), "[^a-z0-9]+", " ", "g"), " ")
    return case(
        (required_words.is_not(None), func.strpos(words, func.concat(" ", required_words, " ")) > 0), else_=true()
    )


async def online_machines(
    session: AsyncSession, settings: Settings, backend: str, rules: BackendRules | None, *, wants_gpu: bool = False
) -> list[DeviceCapabilities]:
    """Return the kinds of devices of a backend's online workers, best first; none if they do not matter.

    A run that `wants_gpu` waits for one, whatever is online.
    """
    if rules is None or not rules.machine_matters or rules.starts_workers:  # a cluster has others than those in use
        return []
    query = select(Device.kind).distinct().join(Worker, Worker.id == Device.worker_id)
    kinds = ["cuda"] if wants_gpu else (await session.scalars(query.where(*online_conditions(settings, backend)))).all()
    # The features of a GPU are known only on its worker; here all are assumed to be present.
    return [
        DeviceCapabilities(kind="cuda", bf16=True, flash_attention=True, flash_attention_3=True)
        if kind == "cuda"
        else DeviceCapabilities(kind="cpu")
        for kind in sorted(kinds, reverse=True)
    ]


def device_conditions(kind: str | None, placement: Placement) -> list[ColumnElement[bool]]:
    """Return the conditions on `Device` and `Worker` for devices that a run asks for, all of this kind if it is set."""
    conditions: list[ColumnElement[bool]] = []
    if kind is not None:
        conditions.append(Device.kind == kind)
    if placement.gpu is not None:
        conditions.append(has_name(literal(name_words(placement.gpu).strip()), _devices.c.name))
    if placement.memory_mb is not None:
        conditions.append(Device.memory_mb >= placement.memory_mb)
    if placement.labels:
        conditions.append(Worker.labels.contains(placement.labels))
    return conditions


async def device_counts(
    session: AsyncSession, settings: Settings, backend: str, kind: str | None, placement: Placement, *, joining: bool
) -> dict[str, list[int]]:
    """Return, by kind, the number of devices of each online worker of a backend that a run asks for, largest first.

    With `joining`, only those of workers that train runs together with others.
    """
    count = func.count().label("devices")
    of_each = select(Device.kind, count).join(Worker, Worker.id == Device.worker_id)
    of_each = of_each.where(*online_conditions(settings, backend), *device_conditions(kind, placement))
    if joining:
        of_each = of_each.where(Worker.group_address.is_not(None))
    counts_by_kind: dict[str, list[int]] = {}
    for row in await session.execute(of_each.group_by(Worker.id, Device.kind).order_by(count.desc())):
        counts_by_kind.setdefault(row.kind, []).append(row.devices)
    return counts_by_kind


async def gpu_names(session: AsyncSession, settings: Settings, backend: str) -> list[str]:
    """Return the names of the GPUs of online workers of a backend."""
    query = select(Device.name).distinct().join(Worker, Worker.id == Device.worker_id)
    names = await session.scalars(
        query.where(Device.kind == "cuda", *online_conditions(settings, backend)).order_by(Device.name)
    )
    return list(names.all())


async def known_labels(session: AsyncSession, backend: str) -> set[str] | None:
    """Return the labels of a backend's workers, also of those that are offline; None if no worker is known."""
    query = select(Worker.labels).distinct().where(Worker.backends.contains([backend]))
    rows = (await session.scalars(query)).all()
    return {label for labels in rows for label in labels} if rows else None


async def have_package(
    session: AsyncSession, settings: Settings, backend: str, kind: str, placement: Placement, package: str
) -> bool:
    """Return True if online workers of a backend have devices of a kind that a run asks for, and all have a package.

    A worker whose version reports no packages counts as one that does not have it.
    """
    query = select(Worker.packages).distinct().join(Device, Device.worker_id == Worker.id)
    rows = (
        await session.scalars(query.where(*online_conditions(settings, backend), *device_conditions(kind, placement)))
    ).all()
    return bool(rows) and all(packages is not None and package in packages for packages in rows)


async def all_look_for_models_in(session: AsyncSession, settings: Settings, backend: str, sources: str | None) -> bool:
    """Return True if workers of a backend are online, and all look for models where `sources` says; see `Worker`."""
    known = (
        await session.scalars(select(Worker.model_sources).distinct().where(*online_conditions(settings, backend)))
    ).all()
    return sources is not None and list(known) == [sources]


async def is_any_online(session: AsyncSession, settings: Settings, backend: str) -> bool:
    """Return True if at least one worker claims runs of this backend now."""
    return await session.scalar(select(Worker.id).where(*online_conditions(settings, backend)).limit(1)) is not None
