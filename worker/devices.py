"""What this machine can train on, without ever creating a CUDA context.

A context in this process, or in one that training processes fork from, would hold GPU memory and break every
fork, so all answers come from the driver's management library (NVML).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import psutil

from app.config import Settings, visible_gpus


@dataclass(frozen=True)
class Device:
    """One thing that one run trains on at a time."""

    kind: Literal["cpu", "cuda"]
    index: int
    id: str
    """`cpu-0`, or the UUID of a GPU, which stays the same when other GPUs come and go."""
    name: str
    memory_bytes: int
    """Memory of the GPU, or an equal share of the machine's."""
    capability: tuple[int, int] | None = None
    """Compute capability of a GPU, such as (9, 0)."""

    def for_job(self) -> dict[str, Any]:
        """What the training process is told: kind, index and id."""
        return {"kind": self.kind, "index": self.index, "id": self.id}


@dataclass(frozen=True)
class Machine:
    """Slots of a worker, one device each, and the machine they are on."""

    devices: tuple[Device, ...]
    memory_bytes: int

    @property
    def slots(self) -> int:
        """Runs at a time."""
        return len(self.devices)


def find(settings: Settings) -> Machine:
    """The slots of this worker: one per GPU, or one CPU; `settings.slots` takes fewer GPUs or more CPUs.

    Raises ValueError when more slots are asked for than there are GPUs, since a run needs a GPU of its own.
    """
    memory = psutil.virtual_memory().total
    found = gpus()
    if found:
        wanted = settings.slots or len(found)
        if wanted > len(found):
            raise ValueError(
                f"ANNEAL_SLOTS={wanted}, but this machine has {len(found)} GPUs and a run needs its own. "
                f"Set ANNEAL_SLOTS to {len(found)} or less."
            )
        return Machine(found[:wanted], memory)
    slots = settings.slots or 1
    cpu = tuple(Device("cpu", index, f"cpu-{index}", _cpu_name(), memory // slots) for index in range(slots))
    return Machine(cpu, memory)


@lru_cache(maxsize=1)
def gpus() -> tuple[Device, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order; empty without a driver."""
    with _nvml() as nvml:
        if nvml is None:
            return ()
        every = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    visible = visible_gpus()
    return every if visible is None else tuple(_visible(every, visible))


def has_gpu() -> bool:
    """Whether there is a GPU that training may use."""
    return bool(gpus())


def capability(index: int) -> tuple[int, int]:
    """Compute capability of the visible GPU `index`; raises IndexError when there is none."""
    found = gpus()[index].capability
    if found is None:
        raise IndexError(index)
    return found


def memory(device: Device) -> tuple[int, int] | None:
    """Bytes of a GPU that are taken, by whomever, and that are free; None for a CPU, or when the driver is silent."""
    if device.kind != "cuda":
        return None
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(device.id))
        except nvml.NVMLError:
            return None
    return int(info.used), int(info.free)


def _visible(every: tuple[Device, ...], visible: str) -> Iterator[Device]:
    """CUDA's own rule: indexes or UUID prefixes, and everything from the first invalid entry on is hidden."""
    for entry in (part.strip() for part in visible.split(",")):
        matching = [
            gpu for gpu in every if str(gpu.index) == entry or (entry.startswith("GPU-") and gpu.id.startswith(entry))
        ]
        if len(matching) != 1:
            return
        yield matching[0]


def _gpu(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        kind="cuda",
        index=index,
        id=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        capability=(major, minor),
    )


@contextmanager
def _nvml() -> Iterator[Any]:
    """The library while open, or None on a machine without it; closed again: forks inherit nothing of it."""
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
