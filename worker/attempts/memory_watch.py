"""Memory of a training process, sampled from outside, so that it is known even if the process dies."""

import time
from collections import deque
from typing import Any

import psutil

from app.infra.process_identity import ProcessIdentity
from worker import devices
from worker.devices import Device
from worker.process import process_group

_SECONDS_BETWEEN = 2.0
_LATEST, _MOST = 60, 200


class MemoryWatch:
    """Memory timeline of an attempt: its last two minutes, and before that evenly spaced samples, bounded in length."""

    def __init__(self, trainer: ProcessIdentity, device: Device) -> None:
        self.peaks: dict[str, int] = {}
        """Highest values seen: `host_mb`, and on a GPU `device_mb`."""
        self._latest: deque[dict[str, Any]] = deque(maxlen=_LATEST)
        """Latest samples, as close together as they were taken: the rise before an end takes seconds."""
        self._before: list[dict[str, Any]] = []
        self._trainer = trainer
        self._device = device
        self._began = time.monotonic()
        self._next = 0.0
        self._spacing = _SECONDS_BETWEEN

    @property
    def timeline(self) -> list[dict[str, Any]]:
        """Samples of the timeline, oldest first.

        Each has `seconds` since the start, `phase`, `host_mb` of the process and everything it started, `host_free_mb`,
        and on a GPU `device_mb` and `device_free_mb` over everything on it.
        """
        return [*self._before, *self._latest]

    def look(self, phase: str) -> None:
        """Take a sample if one is due; may be called at any rate."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN
        noted: dict[str, Any] = {
            "seconds": round(now - self._began, 1),
            "phase": phase,
            "host_mb": process_group.resident_bytes(self._trainer) // 2**20,
            "host_free_mb": psutil.virtual_memory().available // 2**20,
        }
        memory = devices.memory(self._device)
        if memory is not None:
            used, free = memory
            noted |= {"device_mb": used // 2**20, "device_free_mb": free // 2**20}
        for name in ("host_mb", "device_mb"):
            if name in noted:
                self.peaks[name] = max(self.peaks.get(name, 0), noted[name])
        if len(self._latest) == _LATEST:
            self._keep(self._latest[0])
        self._latest.append(noted)

    def _keep(self, noted: dict[str, Any]) -> None:
        if self._before and noted["seconds"] - self._before[-1]["seconds"] < self._spacing:
            return
        self._before.append(noted)
        if len(self._before) > _MOST:
            del self._before[1::2]
            self._spacing *= 2
