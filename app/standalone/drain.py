"""Command `anneal worker --drain`: the workers of this machine and ANNEAL_HOME finish their runs and exit."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from app.config import Settings
from app.workers.status_files import DRAIN_SIGNAL, SHUTDOWN_SIGNAL, WorkerStatus, read_statuses

_LOOK_SECONDS = 0.2
_MORE_SECONDS = 15.0
"""Time beyond the save grace period after which a worker that is still running counts as hung."""


def drain(settings: Settings, timeout: float | None = None, console: Console | None = None) -> int:
    """Drain the workers, show the runs in progress, and return the exit code when all workers have ended.

    After `timeout` seconds the runs are saved and released, so that other workers can resume them. Needs neither
    database nor broker, and can be repeated at any time.
    """
    view = View(console or Console())
    found = read_statuses(settings.home)
    workers = [note for note in found if note.signal(DRAIN_SIGNAL)]
    for note in found:
        if not note.process.is_near and not note.draining:
            view.say(f"Worker {note.id} belongs to another machine or container; drain it there.")
    if not workers:
        view.say(f"No worker runs on this machine with ANNEAL_HOME={settings.home}; nothing to drain.")
        return 0
    for note in workers:
        view.say(f"Worker {note.id} (process {note.process.pid}) is draining and claims no more runs.")
    try:
        return _wait(settings, {note.id: note for note in workers}, timeout, view)
    except KeyboardInterrupt:
        view.say("The workers continue draining. Run the command again to watch, or with --timeout 0 to stop them now.")
        return 130


def _wait(settings: Settings, workers: dict[str, WorkerStatus], timeout: float | None, view: "View") -> int:
    began = time.monotonic()
    save_requested = False
    gone = 0
    with view.live():
        while workers:
            latest = {note.id: note for note in read_statuses(settings.home)}
            workers = {worker_id: latest.get(worker_id, note) for worker_id, note in workers.items()}
            for note in [note for note in workers.values() if not note.process.exists]:
                view.say(_ended(note))
                del workers[note.id]
                gone += 1
            view.show(list(workers.values()), time.monotonic() - began)
            waited = time.monotonic() - began - (timeout or 0.0)
            if timeout is not None and workers and not save_requested and waited >= 0:
                save_requested = True
                view.say(f"Timeout of {timeout:g} s reached: the remaining runs are saved and released.")
                for note in workers.values():
                    note.signal(SHUTDOWN_SIGNAL)
            if save_requested and workers and waited > settings.save_grace_seconds + _MORE_SECONDS:
                for note in workers.values():
                    view.say(f"Worker {note.id} (process {note.process.pid}) does not exit. Check its log, or kill it.")
                return 1
            if workers:
                time.sleep(_LOOK_SECONDS)
    view.say(f"Drained: {gone} worker{'s' if gone > 1 else ''} ended.")
    return 0


def _ended(note: WorkerStatus) -> str:
    if note.runs:
        return f"Worker {note.id} was killed; other workers will resume {', '.join(note.runs)}."
    return f"Worker {note.id} has ended."


class View:
    """Display of the runs in progress: a live table on a terminal, otherwise one line per change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._printed: list[str] = []

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Enter the context in which `show` can be called."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, transient=True, refresh_per_second=4) as self._live:
            yield
        self._live = None

    def show(self, workers: list[WorkerStatus], seconds: float) -> None:
        """Show the runs in progress."""
        if self._live is not None:
            table = Table(box=None, pad_edge=False)
            for title in ("worker", "run", "step", ""):
                table.add_column(title)
            for note in workers:
                for run_id, (step, total) in (note.runs or {"(ending)": [None, None]}).items():
                    table.add_row(note.id, run_id, _steps(step, total), f"{seconds:.0f} s")
            self._live.update(table)
            return
        lines = [f"Still running: {run_id}." for note in workers for run_id in note.runs]
        for line in lines:
            if line not in self._printed:
                self.say(line)
        self._printed = lines


def _steps(step: int | None, total: int | None) -> str:
    return "" if step is None else f"{step:,} of {total:,}" if total else f"{step:,}"
