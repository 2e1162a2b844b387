"""Devices that estimates are for: those of online workers, and others that are known or assumed."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.gpus import Gpu, find_gpu
from anneal.contracts.schemas.estimates import EstimatedDevice
from anneal.contracts.schemas.runs.placement import Placement
from app.config import Settings
from app.tables.workers import Device, Worker
from app.workers.queries import device_conditions, online_conditions


async def online_devices(
    session: AsyncSession, settings: Settings, backend: str, request: Placement | None = None
) -> list[EstimatedDevice]:
    """Return the kinds of devices that online workers offer, GPUs and largest memory first; or those of a `request`."""
    query = select(Device.kind, Device.name, Device.memory_mb).distinct().join(Worker, Worker.id == Device.worker_id)
    if request is not None:
        query = query.where(*device_conditions(request.kind, request))
    rows = (await session.execute(query.where(*online_conditions(settings, backend)))).all()
    devices = [EstimatedDevice(kind=row.kind, name=row.name, memory_mb=row.memory_mb) for row in rows]
    return sorted(devices, key=lambda device: (device.kind == "cuda", device.memory_mb or 0), reverse=True)


async def devices_of_gpu(session: AsyncSession, settings: Settings, backend: str, gpu: Gpu) -> list[EstimatedDevice]:
    """Return the devices of this model that online workers have, or what its data sheet says if there is none."""
    devices = await online_devices(session, settings, backend)
    return [device for device in devices if find_gpu(device.name) is gpu] or [_known_device(gpu)]


def requested_words(placement: Placement) -> str:
    """Describe the device that a request asks for."""
    if placement.gpu is not None:
        device = f"the GPU `{placement.gpu}` (`resources.gpu`)"
    else:
        device = {None: "a device", "cuda": "a GPU", "cpu": "a CPU"}[placement.kind]
    having = []
    if placement.memory_mb is not None:
        having.append(f"{placement.memory_mb:,} MiB (`resources.memory_mb`)")
    if placement.labels:
        having.append(f"the labels {', '.join(f'`{label}`' for label in placement.labels)} (`resources.labels`)")
    return f"{device} with {' and '.join(having)}" if having else device


def _known_device(gpu: Gpu) -> EstimatedDevice:
    return EstimatedDevice(kind="cuda", name=gpu.name, memory_mb=gpu.memory_mb)


def assumed_device(placement: Placement) -> EstimatedDevice:
    """Return the device that is assumed where none is online that the request allows."""
    if (gpu := find_gpu(placement.gpu)) is not None and placement.memory_mb is None:
        return _known_device(gpu)
    return EstimatedDevice(kind=placement.kind or "cuda", name=placement.gpu, memory_mb=placement.memory_mb)
