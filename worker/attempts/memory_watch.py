"""Memory of the training processes of an attempt, sampled from outside, so that it is known even if they die."""

import time
from collections import deque
from collections.abc import Sequence

import psutil

from anneal.contracts.attempt.failure_report import MemoryPoint
from app.infra.process.identity import ProcessIdentity
from worker import devices
from worker.devices import Device
from worker.process import process_group

_SECONDS_BETWEEN = 2.0
_LATEST, _MOST = 60, 200


class MemoryWatch:
    """Memory timeline of an attempt: its last two minutes, and before that evenly spaced samples, bounded in length."""

    def __init__(self, trainers: Sequence[ProcessIdentity], gpus: Sequence[Device]) -> None:
        self.peaks: dict[str, int] = {}
        """Highest values seen: `host_mb`, and on a GPU `device_mb`."""
        self._latest: deque[MemoryPoint] = deque(maxlen=_LATEST)
        """Latest samples, as close together as they were taken: the rise before an end takes seconds."""
        self._before: list[MemoryPoint] = []
        self._trainers = trainers
        self._devices = gpus
        self._began = time.monotonic()
        self._next = 0.0
        self._spacing = _SECONDS_BETWEEN

    @property
    def timeline(self) -> list[MemoryPoint]:
        """Samples of the timeline, oldest first."""
        return [*self._before, *self._latest]

    def sample_if_due(self, phase: str) -> None:
        """Take a sample if one is due; may be called at any rate."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN
        # Of several devices, the one with the least free memory.
        known = [memory for device in self._devices if (memory := devices.memory_use(device)) is not None]
        used, free = min(known, key=lambda used_and_free: used_and_free[1], default=(None, None))
        sample = MemoryPoint(
            seconds=round(now - self._began, 1),
            phase=phase,
            host_mb=sum(map(process_group.resident_bytes, self._trainers)) // 2**20,
            host_free_mb=psutil.virtual_memory().available // 2**20,
            device_mb=None if used is None else used // 2**20,
            device_free_mb=None if free is None else free // 2**20,
        )
        for name, value in (("host_mb", sample.host_mb), ("device_mb", sample.device_mb)):
            if value is not None:
                self.peaks[name] = max(self.peaks.get(name, 0), value)
        if len(self._latest) == _LATEST:
            self._keep_spaced(self._latest[0])
        self._latest.append(sample)

    def _keep_spaced(self, sample: MemoryPoint) -> None:
        if self._before and sample.seconds - self._before[-1].seconds < self._spacing:
            return
        self._before.append(sample)
        if len(self._before) > _MOST:
            del self._before[1::2]
            self._spacing *= 2
