"""Command `anneal worker --drain`: workers of this machine and ANNEAL_HOME finish their runs and exit."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from anneal.local_service import read_json
from app.config import Settings
from app.infra.errors import SetupError
from app.workers.status_files import DRAIN_SIGNAL, SHUTDOWN_SIGNAL, WorkerStatus, read_statuses

_LOOK_SECONDS = 0.2
_MORE_SECONDS = 15.0
"""Time beyond the save grace period after which a worker that is still running counts as hung."""


def drain_workers(
    settings: Settings, timeout: float | None = None, console: Console | None = None, names: Sequence[str] = ()
) -> int:
    """Drain workers, show their runs in progress, and return the exit code when all of them have ended.

    Those are the workers with an id or a process id in `names`; without names, all but that of `anneal up`, which would
    start no other. After `timeout` seconds the runs are saved and released, so that other workers can resume them.
    Needs neither database nor broker, and can be repeated at any time.

    Raises:
        SetupError: No worker of this machine has such a name; nothing is drained.
    """
    view = View(console or Console())
    statuses = read_statuses(settings.home)
    chosen = _select_workers(statuses, names, settings) if names else _all_but_supervised(statuses, settings, view)
    workers = [status for status in chosen if status.send_signal(DRAIN_SIGNAL)]
    if not workers:
        other = "other " if any(status.process.is_near and status.process.exists for status in statuses) else ""
        view.print_line(f"No {other}worker runs on this machine with ANNEAL_HOME={settings.home}; nothing to drain.")
        return 0
    supervised = _supervised_pid(settings)
    for note in workers:
        view.print_line(f"Worker {note.id} (process {note.process.pid}) is draining and claims no more runs.")
        if note.process.pid == supervised:
            view.print_line(
                "It is the worker of `anneal up`, which starts none again: run `anneal down` and `anneal up` then."
            )
    try:
        return _wait_for_workers(settings, {note.id: note for note in workers}, timeout, view)
    except KeyboardInterrupt:
        view.print_line(
            "The workers continue draining. Run the command again to watch, or with --timeout 0 to stop them now."
        )
        return 130


def _select_workers(statuses: Sequence[WorkerStatus], names: Sequence[str], settings: Settings) -> list[WorkerStatus]:
    """Return the running workers with these ids or process ids."""
    running = [status for status in statuses if status.process.is_near and status.process.exists]
    chosen = []
    for name in names:
        matching = [status for status in running if name in (status.id, str(status.process.pid))]
        if not matching:
            if any(status.id == name and not status.process.is_near for status in statuses):
                raise SetupError(f"Worker {name} belongs to another machine or container; drain it there.")
            listed = ", ".join(f"{status.id} (process {status.process.pid})" for status in running) or "none"
            raise SetupError(
                f"No worker {name} runs on this machine with ANNEAL_HOME={settings.home}; nothing is drained. "
                f"Name the id or the process id of one that runs: {listed}."
            )
        chosen += matching
    return chosen


def _all_but_supervised(statuses: Sequence[WorkerStatus], settings: Settings, view: "View") -> list[WorkerStatus]:
    """Return the workers of this machine without that of `anneal up`; name those that are left."""
    supervised, chosen = _supervised_pid(settings), []
    for status in statuses:
        if not status.process.is_near:
            if not status.draining:
                view.print_line(f"Worker {status.id} belongs to another machine or container; drain it there.")
        elif status.process.pid == supervised and status.process.exists:
            view.print_line(
                f"Worker {status.id} (process {supervised}) belongs to `anneal up` and goes on. `anneal down` ends it. "
                f"`anneal worker --drain {status.id}` lets its runs finish; then `anneal up` starts no other before it "
                "is started again."
            )
        else:
            chosen.append(status)
    return chosen


def _supervised_pid(settings: Settings) -> int | None:
    """Return the process id of the worker of `anneal up` in this home; None without one."""
    pids = (read_json(settings.connection_file) or {}).get("pids")
    return pids.get("worker") if isinstance(pids, dict) else None


def _wait_for_workers(settings: Settings, workers: dict[str, WorkerStatus], timeout: float | None, view: "View") -> int:
    began = time.monotonic()
    save_requested = False
    gone = 0
    with view.open_live():
        while workers:
            latest = {note.id: note for note in read_statuses(settings.home)}
            workers = {worker_id: latest.get(worker_id, note) for worker_id, note in workers.items()}
            for note in [note for note in workers.values() if not note.process.exists]:
                view.print_line(_end_sentence(note))
                del workers[note.id]
                gone += 1
            view.show_runs(list(workers.values()), time.monotonic() - began)
            waited = time.monotonic() - began - (timeout or 0.0)
            if timeout is not None and workers and not save_requested and waited >= 0:
                save_requested = True
                view.print_line(f"Timeout of {timeout:g} s reached: the remaining runs are saved and released.")
                for note in workers.values():
                    note.send_signal(SHUTDOWN_SIGNAL)
            if save_requested and workers and waited > settings.save_grace_seconds + _MORE_SECONDS:
                for note in workers.values():
                    view.print_line(
                        f"Worker {note.id} (process {note.process.pid}) does not exit. Check its log, or kill it."
                    )
                return 1
            if workers:
                time.sleep(_LOOK_SECONDS)
    view.print_line(f"Drained: {gone} worker{'s' if gone > 1 else ''} ended.")
    return 0


def _end_sentence(note: WorkerStatus) -> str:
    if note.runs:
        return f"Worker {note.id} was killed; other workers will resume {', '.join(note.runs)}."
    return f"Worker {note.id} has ended."


class View:
    """Display of the runs in progress: a live table on a terminal, otherwise one line per change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._printed: list[str] = []

    def print_line(self, line: str) -> None:
        """Print a permanent line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def open_live(self) -> Iterator[None]:
        """Enter the context in which `show_runs` can be called."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, transient=True, refresh_per_second=4) as self._live:
            yield
        self._live = None

    def show_runs(self, workers: list[WorkerStatus], seconds: float) -> None:
        """Show the runs in progress."""
        if self._live is not None:
            table = Table(box=None, pad_edge=False)
            for title in ("worker", "run", "step", ""):
                table.add_column(title)
            for note in workers:
                for run_id, (step, total) in (note.runs or {"(ending)": [None, None]}).items():
                    table.add_row(note.id, run_id, _steps_text(step, total), f"{seconds:.0f} s")
            self._live.update(table)
            return
        lines = [f"Still running: {run_id}." for note in workers for run_id in note.runs]
        for line in lines:
            if line not in self._printed:
                self.print_line(line)
        self._printed = lines


def _steps_text(step: int | None, total: int | None) -> str:
    return "" if step is None else f"{step:,} of {total:,}" if total else f"{step:,}"
