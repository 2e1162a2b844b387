"""Online workers of a backend, read once and then asked what they have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.backends import BackendRules
from anneal.contracts.schemas.runs.placement import Placement, name_words
from anneal.contracts.training_config.rules import DeviceCapabilities
from app.config import Settings
from app.tables.workers import Device, Worker
from app.workers.queries import online_conditions


class OnlineDevice(NamedTuple):
    """Device of an online worker, whether it is free or not."""

    kind: str
    name: str
    memory_mb: int | None

    def is_allowed(self, kind: str | None, placement: Placement) -> bool:
        """Return True if it is of this kind (None: any) and as large as a run asks for, and the GPU that it names."""
        is_named = placement.gpu is None or name_words(placement.gpu) in name_words(self.name)
        return kind in (None, self.kind) and is_named and (self.memory_mb or 0) >= (placement.memory_mb or 0)


@dataclass(frozen=True)
class OnlineWorker:
    """Worker that claims runs now."""

    devices: Sequence[OnlineDevice]
    labels: frozenset[str]
    plugins: Mapping[str, Sequence[str]] | None
    """Names of installed plugins, by kind; None if its version does not report them."""
    packages: frozenset[str] | None
    """None if its version does not report them."""
    model_sources: str | None
    """Digest of where it looks for models (`app.base_models.sources`); None if that is not known."""
    joins_hosts: bool
    """True if it trains runs together with workers of other hosts."""

    def devices_for(self, kind: str | None, placement: Placement) -> list[OnlineDevice]:
        """Return its devices of a kind (None: any) that a run may use."""
        has_labels = self.labels.issuperset(placement.labels)
        return [device for device in self.devices if has_labels and device.is_allowed(kind, placement)]


async def read_online_workers(session: AsyncSession, settings: Settings, backend: str) -> list[OnlineWorker]:
    """Return the workers that claim runs of a backend now."""
    device = func.jsonb_build_array(Device.kind, Device.name, Device.memory_mb)
    devices: Any = func.jsonb_agg(aggregate_order_by(device, Device.index))
    query = select(
        Worker.labels, Worker.plugins, Worker.packages, Worker.model_sources,
        Worker.group_address.is_not(None).label("joins_hosts"),
        devices.filter(Device.worker_id.is_not(None)).label("devices"),
    )  # fmt: skip
    query = query.join(Device, Device.worker_id == Worker.id, isouter=True)
    each = query.where(*online_conditions(settings, backend)).group_by(Worker.id).subquery()
    # A thousand workers are mostly alike: each kind is sent and decoded once.
    rows = await session.execute(select(*each.c, func.count().label("workers")).group_by(*each.c))
    online: list[OnlineWorker] = []
    for row in rows:
        worker = OnlineWorker(
            devices=[OnlineDevice(*device) for device in row.devices or ()],
            labels=frozenset(row.labels),
            plugins=row.plugins,
            packages=None if row.packages is None else frozenset(row.packages),
            model_sources=row.model_sources,
            joins_hosts=row.joins_hosts,
        )
        online += [worker] * row.workers
    return online


def online_machines(
    workers: Sequence[OnlineWorker], rules: BackendRules | None, *, wants_gpu: bool = False
) -> list[DeviceCapabilities]:
    """Return the kinds of devices of a backend's workers, best first; none if they do not matter.

    A run that `wants_gpu` waits for one, whatever is online.
    """
    if rules is None or not rules.machine_matters or rules.starts_workers:  # a cluster has others than those in use
        return []
    kinds = {"cuda"} if wants_gpu else {device.kind for worker in workers for device in worker.devices}
    # The features of a GPU are known only on its worker; here all are assumed to be present.
    return [
        DeviceCapabilities(kind="cuda", bf16=True, flash_attention=True, flash_attention_3=True)
        if kind == "cuda"
        else DeviceCapabilities(kind="cpu")
        for kind in sorted(kinds, reverse=True)
    ]


def count_devices(
    workers: Sequence[OnlineWorker], kind: str | None, placement: Placement, *, joining: bool
) -> dict[str, list[int]]:
    """Return, by kind, the number of devices of each worker that a run may use, largest first.

    With `joining`, only those of workers that train runs together with others.
    """
    counts_by_kind: dict[str, list[int]] = {}
    for worker in workers:
        kinds = [device.kind for device in worker.devices_for(kind, placement) if worker.joins_hosts or not joining]
        for each in set(kinds):
            counts_by_kind.setdefault(each, []).append(kinds.count(each))
    return {each: sorted(counts, reverse=True) for each, counts in counts_by_kind.items()}


def gpu_names(workers: Sequence[OnlineWorker]) -> list[str]:
    """Return the names of the GPUs of workers."""
    return sorted({device.name for worker in workers for device in worker.devices if device.kind == "cuda"})


def have_package(workers: Sequence[OnlineWorker], kind: str, placement: Placement, package: str) -> bool:
    """Return True if workers have devices of a kind that a run may use, and all of these workers have a package.

    A worker whose version reports no packages counts as one that does not have it.
    """
    usable = [worker for worker in workers if worker.devices_for(kind, placement)]
    return bool(usable) and all(package in (worker.packages or ()) for worker in usable)
