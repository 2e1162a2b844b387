"""Training devices of this machine, found without creating a CUDA context.

A context in this process, or in one that training processes fork from, would hold GPU memory and break every fork, so
all information comes from the driver's management library (NVML).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import psutil

from app.config import Settings, visible_gpus
from app.contracts.attempt.device import AssignedDevice


@dataclass(frozen=True)
class Device:
    """Device that one run trains on at a time."""

    kind: Literal["cpu", "cuda"]
    index: int
    id: str
    """`cpu-0`, or the UUID of a GPU, which does not change when other GPUs are added or removed."""
    name: str
    memory_bytes: int
    """Memory of the GPU, or an equal share of the machine's memory."""
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


def find(settings: Settings) -> Machine:
    """Find the worker's slots: one per GPU, or one CPU; `settings.slots` selects fewer GPUs or more CPU slots.

    Raises:
        ValueError: More slots are requested than there are GPUs; each run needs its own GPU.
    """
    memory = psutil.virtual_memory().total
    found = gpus()
    if found:
        wanted = settings.slots or len(found)
        if wanted > len(found):
            raise ValueError(
                f"ANNEAL_SLOTS={wanted}, but this machine has {len(found)} GPUs and each run needs its own. "
                f"Set ANNEAL_SLOTS to {len(found)} or less."
            )
        return Machine(found[:wanted], memory)
    slots = settings.slots or 1
    cpu = tuple(Device("cpu", index, f"cpu-{index}", _cpu_name(), memory // slots) for index in range(slots))
    return Machine(cpu, memory)


@lru_cache(maxsize=1)
def gpus() -> tuple[Device, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order; empty without a driver."""
    with nvml() as library:
        if library is None:
            return ()
        every = tuple(_gpu(library, index) for index in range(library.nvmlDeviceGetCount()))
    visible = visible_gpus()
    return every if visible is None else tuple(_visible(every, visible))


def has_gpu() -> bool:
    """Return True if there is a GPU that training may use."""
    return bool(gpus())


def capability(index: int) -> tuple[int, int]:
    """Return the compute capability of the visible GPU `index`; raise IndexError if there is none."""
    found = gpus()[index].capability
    if found is None:
        raise IndexError(index)
    return found


def memory(device: Device) -> tuple[int, int] | None:
    """Return the used and free bytes of a GPU; None for a CPU or if the driver does not answer.

    All processes on the GPU count as users.
    """
    if device.kind != "cuda":
        return None
    with nvml() as library:
        if library is None:
            return None
        try:
            info = library.nvmlDeviceGetMemoryInfo(library.nvmlDeviceGetHandleByUUID(device.id))
        except library.NVMLError:
            return None
    return int(info.used), int(info.free)


def _visible(every: tuple[Device, ...], visible: str) -> Iterator[Device]:
    """Apply CUDA's rule: entries are indexes or UUID prefixes; the first invalid one hides itself and the rest."""
    for entry in (part.strip() for part in visible.split(",")):
        matching = [
            gpu for gpu in every if str(gpu.index) == entry or (entry.startswith("GPU-") and gpu.id.startswith(entry))
        ]
        if len(matching) != 1:
            return
        yield matching[0]


def _gpu(library: Any, index: int) -> Device:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        kind="cuda",
        index=index,
        id=_text(library.nvmlDeviceGetUUID(handle)),
        name=_text(library.nvmlDeviceGetName(handle)),
        memory_bytes=int(library.nvmlDeviceGetMemoryInfo(handle).total),
        capability=(major, minor),
    )


@contextmanager
def nvml() -> Iterator[Any]:
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


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine
