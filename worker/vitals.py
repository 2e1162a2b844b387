"""The memory of a training process, looked at from outside, so that something is known of one that died."""

import time
from typing import Any

import psutil

from worker import devices, session
from worker.devices import Device

_SECONDS_BETWEEN = 2.0
_MOST = 240


class Vitals:
    """A timeline of an attempt: evenly spaced, and of a bounded length however long the attempt takes."""

    def __init__(self, trainer: session.Identity, device: Device) -> None:
        self.timeline: list[dict[str, Any]] = []
        """Of each look: `seconds` since the start, `phase`, `host_mb` of the process and all that it started,
        `host_free_mb`, and on a GPU `device_mb` and `device_free_mb` of all that is on it."""
        self._trainer = trainer
        self._device = device
        self._began = time.monotonic()
        self._next = 0.0
        self._spacing = _SECONDS_BETWEEN

    def look(self, phase: str) -> None:
        """Note how things stand, if it is time to; call as often as you like."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._spacing
        noted: dict[str, Any] = {
            "seconds": round(now - self._began, 1),
            "phase": phase,
            "host_mb": session.resident_bytes(self._trainer) // 2**20,
            "host_free_mb": psutil.virtual_memory().available // 2**20,
        }
        memory = devices.memory(self._device)
        if memory is not None:
            used, free = memory
            noted |= {"device_mb": used // 2**20, "device_free_mb": free // 2**20}
        self.timeline.append(noted)
        if len(self.timeline) > _MOST:
            del self.timeline[1::2]
            self._spacing *= 2

    @property
    def peaks(self) -> dict[str, int]:
        """The highest of what was seen: `host_mb`, and on a GPU `device_mb`."""
        return {
            name: max(noted[name] for noted in self.timeline if name in noted)
            for name in ("host_mb", "device_mb")
            if any(name in noted for noted in self.timeline)
        }
