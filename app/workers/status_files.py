"""Workers of this machine and ANNEAL_HOME: status files below `run/workers`, and signals; needs no database."""

import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from anneal.local_service import read_json
from app.infra.private_files import try_write_private_json
from app.infra.process.handle import open_process
from app.infra.process.identity import ProcessIdentity

DRAIN_SIGNAL = signal.SIGUSR1
"""Signal to a worker to claim no more runs and to exit when its current runs have finished."""

SHUTDOWN_SIGNAL = signal.SIGTERM
"""Signal to a worker to save and release its runs now, and to exit."""

_KEPT_SECONDS = 3600.0


@dataclass(frozen=True)
class WorkerStatus:
    """Status file of a worker."""

    id: str
    process: ProcessIdentity
    draining: bool = False
    runs: dict[str, list[int | None]] = field(default_factory=dict)
    """Current runs, each with its step and total steps as far as they are known."""
    warm: bool = False
    """True once a training process starts without loading its libraries first, or if none is kept ready."""

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal to exactly this process, never to another one that reused its id; False if it has ended."""
        if not self.process.is_near:
            return False
        try:
            process = open_process(self.process.pid)
        except ProcessLookupError:
            return False
        with process:
            # Checked after opening: from here on a reuse of the id by another process is detected.
            return self.process.exists and process.send_signal(number)


class WorkerStatusFile:
    """Writer of a worker's status file, updated on changes; a full disk loses the file but does not stop the worker."""

    def __init__(self, home: Path, worker_id: str) -> None:
        self._folder = _status_folder(home)
        self._lock = threading.Lock()
        self._note = WorkerStatus(worker_id, ProcessIdentity.of_this_process())

    def open(self) -> None:
        """Write the first status, and delete status files of workers that ended long ago."""
        for path in self._folder.glob("*.json"):
            note = _read_status(path)
            if note is not None and (not note.process.is_near or note.process.exists):
                continue  # of another machine or container, or still running
            with suppress(OSError):
                # `anneal up` may still need to know that a worker was drained on purpose.
                if note is None or not note.draining or time.time() - path.stat().st_mtime > _KEPT_SECONDS:
                    path.unlink()
        self._write(self._note)

    def update(
        self, *, draining: bool | None = None, runs: dict[str, list[int | None]] | None = None, warm: bool | None = None
    ) -> None:
        """Update the given fields and rewrite the file if they changed."""
        with self._lock:
            changed = self._note
            if draining is not None:
                changed = replace(changed, draining=draining)
            if runs is not None:
                changed = replace(changed, runs=runs)
            if warm is not None:
                changed = replace(changed, warm=warm)
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
        try_write_private_json(self._path, asdict(note), durable=False)


def read_statuses(home: Path) -> list[WorkerStatus]:
    """Read all status files of this home, including those of ended workers and of other machines."""
    statuses = [_read_status(path) for path in sorted(_status_folder(home).glob("*.json"))]
    return [note for note in statuses if note is not None]


def was_drained(home: Path, pid: int) -> bool:
    """Return True if the ended worker with this process id had been requested to drain."""
    ended = (note for note in read_statuses(home) if note.process.is_near and not note.process.exists)
    return any(note.process.pid == pid and note.draining for note in ended)


def _status_folder(home: Path) -> Path:
    return home / "run" / "workers"


def _read_status(path: Path) -> WorkerStatus | None:
    document = read_json(path)
    try:
        return (
            None
            if document is None
            else WorkerStatus(**{**document, "process": ProcessIdentity(**document["process"])})
        )
    except (KeyError, TypeError):
        return None
