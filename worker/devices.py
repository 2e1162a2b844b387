"""Training devices of this machine, found without creating a CUDA context.

A context in this process, or in one that training processes fork from, would hold GPU memory and break every fork, so
all information comes from the driver's management library (NVML).
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import psutil

from anneal.contracts.attempt.device import AssignedDevice
from app.config import Settings, visible_gpus

log = logging.getLogger(__name__)

_MOST_OCCUPIED = 0.5
"""Fraction of an idle GPU's memory that other programs may use, such as a display or a small model server."""
_NO_GPU = ("", "-1")
"""Entries of CUDA_VISIBLE_DEVICES that hide every GPU on purpose."""


@dataclass(frozen=True)
class Device:
    """Device that one run trains on at a time."""

    kind: Literal["cpu", "cuda"]
    index: int
    """Number of the device on this machine; a GPU that MIG partitions counts as its instances."""
    id: str
    """`cpu-0`, or the UUID of a GPU or a MIG instance, which does not change when other GPUs are added or removed."""
    name: str
    memory_bytes: int
    """Memory of the GPU or the MIG instance, or an equal share of the machine's memory."""
    capability: tuple[int, int] | None = None
    """Compute capability of a GPU, such as (9, 0)."""

    def for_job(self) -> AssignedDevice:
        """Return the device as a training process knows it."""
        return AssignedDevice(self.kind, self.index, self.id)


@dataclass(frozen=True)
class Machine:
    """Devices of a worker, one per slot, and the memory of the machine."""

    devices: tuple[Device, ...]
    memory_bytes: int

    @property
    def slots(self) -> int:
        """Number of runs that train at the same time."""
        return len(self.devices)

    def select_devices(self, indexes: Sequence[int]) -> list[Device]:
        """Return the devices with these indexes, in the order of the indexes."""
        by_index = {device.index: device for device in self.devices}
        return [by_index[index] for index in indexes]


def find_machine(settings: Settings) -> Machine:
    """Find the worker's slots: one per GPU, or one CPU; `settings.slots` selects fewer GPUs or more CPU slots.

    Raises:
        ValueError: More slots are requested than there are GPUs; each run needs its own GPU.
    """
    memory = psutil.virtual_memory().total
    machine_gpus = list_gpus()
    if machine_gpus:
        slot_count = settings.slots or len(machine_gpus)
        if slot_count > len(machine_gpus):
            raise ValueError(
                f"ANNEAL_SLOTS={slot_count}, but this machine has {len(machine_gpus)} GPUs and each run needs its own. "
                f"Set ANNEAL_SLOTS to {len(machine_gpus)} or less."
            )
        return Machine(machine_gpus[:slot_count], memory)
    slots = settings.slots or 1
    cpu = tuple(Device("cpu", index, f"cpu-{index}", _cpu_name(), memory // slots) for index in range(slots))
    return Machine(cpu, memory)


@lru_cache(maxsize=1)
def list_gpus() -> tuple[Device, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order; empty without a driver.

    The instances of a GPU that MIG partitions are GPUs of their own, since a process can use only one of them.
    """
    with open_nvml() as library:
        if library is None:
            return ()
        every = list(_every_gpu(library))
    visible = visible_gpus()
    usable = (gpu.devices for gpu in every) if visible is None else _select_visible(every, visible)
    return tuple(dict.fromkeys(device for devices in usable for device in devices))


def has_gpu() -> bool:
    """Return True if there is a GPU that training may use."""
    return bool(list_gpus())


def compute_capability(index: int) -> tuple[int, int]:
    """Return the compute capability of the visible GPU `index`; raise IndexError if there is none."""
    version = list_gpus()[index].capability
    if version is None:
        raise IndexError(index)
    return version


def memory_use(device: Device) -> tuple[int, int] | None:
    """Return the used and free bytes of a GPU; None for a CPU or if the driver does not answer.

    All processes on the GPU count as users.
    """
    if device.kind != "cuda":
        return None
    with open_nvml() as library:
        if library is None:
            return None
        try:
            info = library.nvmlDeviceGetMemoryInfo(library.nvmlDeviceGetHandleByUUID(device.id))
        except library.NVMLError:
            return None
    return int(info.used), int(info.free)


def occupation_reason(device: Device) -> str | None:
    """Return a sentence about other programs that use the memory of an idle GPU; None if it is free for a run."""
    used, _ = memory_use(device) or (0, 0)
    if used <= device.memory_bytes * _MOST_OCCUPIED:
        return None
    return (
        f"other programs use {used / 2**30:.1f} of {device.memory_bytes / 2**30:.1f} GiB of its memory: end them, or "
        "start the worker with a CUDA_VISIBLE_DEVICES that leaves it out"
    )


@dataclass(frozen=True)
class _Gpu:
    """Physical GPU: one device, or its MIG instances."""

    uuid: str
    devices: tuple[Device, ...]


def _select_visible(every: Sequence[_Gpu], visible: str) -> Iterator[tuple[Device, ...]]:
    """Apply CUDA's rule: entries are indexes or UUID prefixes; the first invalid one hides itself and the rest.

    An entry that names a partitioned GPU shows all its instances.
    """
    matching: list[tuple[Device, ...]]
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):
            matching = [(one,) for gpu in every for one in gpu.devices if one.id.startswith(entry)]
        else:
            matching = [
                gpu.devices
                for number, gpu in enumerate(every)
                if str(number) == entry or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
            ]
        if len(matching) != 1:
            if entry not in _NO_GPU:
                log.warning(
                    "CUDA_VISIBLE_DEVICES hides %s and what follows it: there is %s GPU or MIG instance of that name; "
                    "`nvidia-smi -L` lists them",
                    entry,
                    "more than one" if matching else "no",
                )
            return
        yield matching[0]


def _every_gpu(library: Any) -> Iterator[_Gpu]:
    """Yield every GPU; their devices are numbered throughout."""
    begin = 0
    for number in range(library.nvmlDeviceGetCount()):
        gpu = library.nvmlDeviceGetHandleByIndex(number)
        uuid, instances = _decode_text(library.nvmlDeviceGetUUID(gpu)), _mig_instances(library, gpu)
        if instances == []:
            log.warning("GPU %d (%s) has MIG enabled and no instance: create some, or disable MIG", number, uuid)
        handles = [gpu] if instances is None else instances
        yield _Gpu(
            uuid, tuple(_build_device(library, gpu, handle, index) for index, handle in enumerate(handles, begin))
        )
        begin += len(handles)


def _mig_instances(library: Any, gpu: Any) -> list[Any] | None:
    """Return the MIG instances of a GPU; None if it is not partitioned."""
    try:
        current, _pending = library.nvmlDeviceGetMigMode(gpu)
    except library.NVMLError:  # a GPU or a driver without MIG
        return None
    if current != library.NVML_DEVICE_MIG_ENABLE:
        return None
    instances = []
    for number in range(library.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            instances.append(library.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number))
        except library.NVMLError:  # there may be fewer instances, with gaps between their numbers
            continue
    return instances


def _build_device(library: Any, gpu: Any, handle: Any, index: int) -> Device:
    """Return the device of a handle, which is that of the GPU or of an instance of it."""
    major, minor = library.nvmlDeviceGetCudaComputeCapability(gpu)
    return Device(
        kind="cuda",
        index=index,
        id=_decode_text(library.nvmlDeviceGetUUID(handle)),
        name=_decode_text(library.nvmlDeviceGetName(handle)),
        memory_bytes=int(library.nvmlDeviceGetMemoryInfo(handle).total),
        capability=(major, minor),
    )


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Open NVML for the block (None on a machine without it) and close it, so that forks inherit nothing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        yield None
        return
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _decode_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine
