"""Devices that estimates are for: those of online workers, and others that are known or assumed."""

from collections.abc import Sequence

from anneal.contracts.gpus import Gpu, find_gpu
from anneal.contracts.schemas.estimates import EstimatedDevice
from anneal.contracts.schemas.runs.placement import Placement
from app.workers.online import OnlineWorker


def online_devices(workers: Sequence[OnlineWorker], placement: Placement | None = None) -> list[EstimatedDevice]:
    """Return the kinds of devices that workers offer, GPUs and largest memory first; or those that a run may use."""
    allowed = placement or Placement()
    kinds = {device for worker in workers for device in worker.devices_for(allowed.kind, allowed)}
    largest_first = sorted(
        kinds, key=lambda device: (device.kind == "cuda", device.memory_mb or 0, device.name), reverse=True
    )
    return [EstimatedDevice(**device._asdict()) for device in largest_first]


def devices_of_gpu(workers: Sequence[OnlineWorker], gpu: Gpu) -> list[EstimatedDevice]:
    """Return the devices of this model that workers have, or what its data sheet says if there is none."""
    return [device for device in online_devices(workers) if find_gpu(device.name) is gpu] or [_known_device(gpu)]


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
