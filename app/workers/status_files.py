"""Workers of this machine and ANNEAL_HOME: status files below `run/workers`, and signals; needs no database."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from app.infra.process_identity import boot_id, pid_namespace, process_started

DRAIN_SIGNAL = signal.SIGUSR1
"""Signal to a worker to claim no more runs and to exit when its current runs have finished."""

SHUTDOWN_SIGNAL = signal.SIGTERM
"""Signal to a worker to save and release its runs now, and to exit."""

_KEPT_SECONDS = 3600.0


@dataclass(frozen=True)
class WorkerStatus:
    """Status file of a worker; `process_started`, boot id and namespace make its process id unique."""

    id: str
    pid: int
    process_started: int
    boot_id: str
    namespace: str
    draining: bool = False
    runs: dict[str, list[int | None]] = field(default_factory=dict)
    """Current runs, each with its step and total steps as far as they are known."""

    @property
    def is_near(self) -> bool:
        """True if its process id is valid here: same boot and same pid namespace."""
        return (self.boot_id, self.namespace) == (boot_id(), pid_namespace())

    @property
    def is_alive(self) -> bool:
        """True if exactly this process is running."""
        return self.is_near and process_started(self.pid) == self.process_started

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to exactly this process, never to another one that reused its id; False if it has ended."""
        if not self.is_near:
            return False
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # Check after opening the pidfd: from here on a reuse of the id by another process is detected.
            if not self.is_alive:
                return False
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(process)
        return True


class WorkerStatusFile:
    """Writer of a worker's status file, updated on changes; a full disk loses the file but does not stop the worker."""

    def __init__(self, home: Path, worker_id: str) -> None:
        self._folder = _folder(home)
        self._lock = threading.Lock()
        pid = os.getpid()
        self._note = WorkerStatus(worker_id, pid, process_started(pid) or 0, boot_id(), pid_namespace())

    def open(self) -> None:
        """Write the first status, and delete status files of workers that ended long ago."""
        for path in self._folder.glob("*.json"):
            note = _read(path)
            if note is not None and (not note.is_near or note.is_alive):
                continue  # of another machine or container, or still running
            with suppress(OSError):
                # `anneal up` may still need to know that a worker was drained on purpose.
                if note is None or not note.draining or time.time() - path.stat().st_mtime > _KEPT_SECONDS:
                    path.unlink()
        self._write(self._note)

    def update(self, *, draining: bool | None = None, runs: dict[str, list[int | None]] | None = None) -> None:
        """Update the given fields and rewrite the file if they changed."""
        with self._lock:
            changed = self._note
            if draining is not None:
                changed = replace(changed, draining=draining)
            if runs is not None:
                changed = replace(changed, runs=runs)
            if changed != self._note:
                self._note = changed
                self._write(changed)

    def close(self) -> None:
        """Delete the status file when the worker ends; keep it if the worker was drained."""
        if self._note.draining:
            self.update(runs={})
        else:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._note.id}.json"

    def _write(self, note: WorkerStatus) -> None:
        fresh = self._path.with_suffix(".new")
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_text(json.dumps(asdict(note)))
            fresh.replace(self._path)


def read_statuses(home: Path) -> list[WorkerStatus]:
    """Read all status files of this home, including those of ended workers and of other machines."""
    found = [_read(path) for path in sorted(_folder(home).glob("*.json"))]
    return [note for note in found if note is not None]


def was_drained(home: Path, pid: int) -> bool:
    """Return True if the ended worker with this process id had been requested to drain."""
    return any(note.pid == pid and note.draining and note.is_near and not note.is_alive for note in read_statuses(home))


def _folder(home: Path) -> Path:
    return home / "run" / "workers"


def _read(path: Path) -> WorkerStatus | None:
    try:
        found: Any = json.loads(path.read_text())
        return WorkerStatus(**found)
    except (OSError, ValueError, TypeError):
        return None
