"""Whether a worker should take runs at all: a sick one is idle, so it would take each of them, and fail it."""

import os
import time
from pathlib import Path

ROOM_BYTES = 16 * 2**20
_FIRST_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 30.0


class Fitness:
    """What is wrong with a worker, as far as it can tell before it takes a run."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        self._pause = 0.0
        self._paused_until = 0.0
        self._why = ""

    def trouble(self) -> str | None:
        """Why no run should be taken now; None: all is well."""
        if time.monotonic() < self._paused_until:
            return f"the last one could not be started here: {self._why}"
        try:
            disk = os.statvfs(self._storage)
        except OSError as error:
            return f"the storage {self._storage} is not there: {error.strerror}"
        if not (self._storage / "datasets").is_dir():
            # Every run has a data set, which the API has stored.
            return f"the storage {self._storage} holds no data sets: give API and workers the same ANNEAL_STORAGE"
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < ROOM_BYTES:  # some network file systems count no blocks
            return f"the storage {self._storage} is full: make room, then waiting runs are taken"
        if not os.access(self._storage, os.W_OK):
            return f"the storage {self._storage} cannot be written to"
        return None

    def failed(self, why: str) -> None:
        """A run could not even be started here: another worker should have its turn, the longer the more often."""
        self._pause = min(max(self._pause * 2, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        self._paused_until = time.monotonic() + self._pause
        self._why = why

    def started(self) -> None:
        """A trainer could be started."""
        self._pause = 0.0
