"""The workers of this machine and home: notes that they keep below `run/workers`, and signals to them, no database."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

TAKE_NO_MORE = signal.SIGUSR1
"""Asks a worker to take no further run, and to end when those at work have finished."""
END_SOON = signal.SIGTERM
"""Asks it to have its runs saved and handed back now, and to end."""
_KEPT_SECONDS = 3600.0


@dataclass(frozen=True)
class Note:
    """What a worker says of itself; `process_started`, boot and namespace make its process id unique for ever."""

    id: str
    pid: int
    process_started: int
    boot_id: str
    namespace: str
    draining: bool = False
    runs: dict[str, list[int | None]] = field(default_factory=dict)
    """The runs at work, each with its step and its steps in all as far as they are known."""

    @property
    def is_near(self) -> bool:
        """Whether its process id means something here: the same boot, the same pid namespace."""
        return (self.boot_id, self.namespace) == (boot_id(), namespace())

    @property
    def is_alive(self) -> bool:
        """Whether this very process is there."""
        return self.is_near and process_started(self.pid) == self.process_started

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this very process, never to another one that was given its id; False when it is gone."""
        if not self.is_near:
            return False
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # Looked at through the open descriptor: now the id cannot pass to another process unnoticed.
            if not self.is_alive:
                return False
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(process)
        return True


class Notebook:
    """A worker's own note, rewritten as things change; a disk that is full costs the note, not the worker."""

    def __init__(self, home: Path, worker_id: str) -> None:
        self._folder = _folder(home)
        self._lock = threading.Lock()
        pid = os.getpid()
        self._note = Note(worker_id, pid, process_started(pid) or 0, boot_id(), namespace())

    def open(self) -> None:
        """Write the first note, and clear away those of workers that are long gone."""
        for path in self._folder.glob("*.json"):
            note = _read(path)
            if note is not None and (not note.is_near or note.is_alive):
                continue  # of another machine, of another container, or at work
            with suppress(OSError):
                # `anneal up` may still want to know that one was drained on purpose.
                if note is None or not note.draining or time.time() - path.stat().st_mtime > _KEPT_SECONDS:
                    path.unlink()
        self._write(self._note)

    def update(self, *, draining: bool | None = None, runs: dict[str, list[int | None]] | None = None) -> None:
        """Say what has changed."""
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
        """The worker has ended; that it was drained stays on record."""
        if self._note.draining:
            self.update(runs={})
        else:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._note.id}.json"

    def _write(self, note: Note) -> None:
        fresh = self._path.with_suffix(".new")
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_text(json.dumps(asdict(note)))
            fresh.replace(self._path)


def notes(home: Path) -> list[Note]:
    """All notes of this home, those of dead workers and of other machines included."""
    found = [_read(path) for path in sorted(_folder(home).glob("*.json"))]
    return [note for note in found if note is not None]


def was_drained(home: Path, pid: int) -> bool:
    """Whether the worker that had this process id had been told to drain."""
    return any(note.pid == pid and note.draining and note.is_near and not note.is_alive for note in notes(home))


def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def namespace() -> str:
    """The pid namespace: a container has its own."""
    return str(Path("/proc/self/ns/pid").readlink())


def process_started(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None when there is none, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in parentheses may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def _folder(home: Path) -> Path:
    return home / "run" / "workers"


def _read(path: Path) -> Note | None:
    try:
        found: Any = json.loads(path.read_text())
        return Note(**found)
    except (OSError, ValueError, TypeError):
        return None
