"""Health check of a worker: an unhealthy worker is idle, so it would claim every run and fail it."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.infra.files.disk_space import DatabaseReserve, few_inodes, free_bytes
from app.infra.process.identity import ProcessIdentity

ROOM_BYTES = 16 * 2**20
_FIRST_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 30.0
_FIRST_DEVICE_PAUSE_SECONDS = 60.0
_LONGEST_DEVICE_PAUSE_SECONDS = 3600.0
UNUSABLE_PAUSE_SECONDS = 15.0
"""Time until a GPU whose memory other programs use, or on which a check failed, is looked at again."""


class WorkerHealth:
    """Health of a worker, as far as it can be checked before it takes a run."""

    def __init__(
        self, storage: Path, *, is_shared: bool = True, database_reserve: DatabaseReserve | None = None
    ) -> None:
        """Watch a folder in which, if `is_shared`, the API stores datasets; else it is a copy of an object store.

        With `database_reserve`, watch the disk of the embedded database too.
        """
        self._storage = storage
        self._is_shared = is_shared
        self._database_reserve = database_reserve
        self._pause = 0.0
        self._paused_until = 0.0
        self._why = ""
        self._device_pauses: dict[int, float] = {}
        self.unusable: set[int] = set()
        """Devices that take no run because other programs use their memory, or because a check failed on them."""
        self._survivors: dict[int, list[ProcessIdentity]] = {}
        """Processes that were killed but do not end, by the index of the device that they may hold."""

    def unhealthy_reason(self) -> str | None:
        """Return the reason why no run should be taken now; None if the worker is healthy."""
        if time.monotonic() < self._paused_until:
            return f"the last run could not be started here: {self._why}"
        try:
            free, inodes = free_bytes(self._storage), few_inodes(self._storage)
        except OSError as error:
            return f"the storage {self._storage} is not available: {error.strerror}"
        if self._is_shared and not (self._storage / "datasets").is_dir():
            # Every run has a dataset, which the API has stored.
            return f"the storage {self._storage} holds no datasets: set the same ANNEAL_STORAGE for API and workers"
        if inodes is not None or (free is not None and free < ROOM_BYTES):
            return f"the storage {self._storage} is full: free some space, then pending runs are taken"
        if self._database_reserve is not None and (shortage := self._database_reserve.describe_shortage()):
            return f"{shortage}: free some space, then pending runs are taken"
        if not os.access(self._storage, os.W_OK):
            return f"the storage {self._storage} cannot be written to"
        return None

    def record_failed_start(self, why: str) -> None:
        """Record that a run could not be started here, and pause so that another worker can take it.

        Each further failure doubles the pause, up to a maximum.
        """
        self._pause = min(max(self._pause * 2, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        self._paused_until = time.monotonic() + self._pause
        self._why = why

    def record_start(self) -> None:
        """Record that a trainer was started, which resets the pause."""
        self._pause = 0.0

    def device_failed(self, index: int) -> float:
        """Record that a device failed; return the seconds for which it should take no run.

        A device with an error fails each run at once, so it would take all that are pending. Each further failure
        doubles the pause, up to an hour, until a run has trained on the device.
        """
        pause = min(self._device_pauses.get(index, _FIRST_DEVICE_PAUSE_SECONDS / 2) * 2, _LONGEST_DEVICE_PAUSE_SECONDS)
        self._device_pauses[index] = pause
        return pause

    def device_worked(self, index: int) -> bool:
        """Record that a run has trained on a device; return True if the device had failed before."""
        return self._device_pauses.pop(index, None) is not None

    def record_survivors(self, indexes: Iterable[int], processes: Sequence[ProcessIdentity]) -> None:
        """Record that processes that trained on these devices were killed and may not have ended."""
        for index in indexes:
            self._survivors.setdefault(index, []).extend(processes)

    def survivors_reason(self, index: int) -> str | None:
        """Return a sentence about the processes that hold a device although they were killed; None if none is left."""
        living = [process for process in self._survivors.get(index, ()) if process.exists]
        if not living:
            self._survivors.pop(index, None)
            return None
        self._survivors[index] = living
        numbers = ", ".join(str(process.pid) for process in living)
        return f"process {numbers} of an earlier run was killed and does not end: restart the machine"
