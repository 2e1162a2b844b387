"""Fault injection inside a process of the service: false results of commits, and clock jumps.

The suite controls it through files in a folder, so the product needs no code for it.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SCAN_SECONDS = 0.01


class Orders:
    """Orders of the suite to its processes: one file each, renamed by the process that executes it."""

    def __init__(self, folder: Path) -> None:
        self.waiting = folder / "waiting"
        self.taken = folder / "taken"
        self.waiting.mkdir(parents=True, exist_ok=True)
        self.taken.mkdir(exist_ok=True)

    def give(self, name: str, **order: Any) -> None:
        """Write an order; it is executed once."""
        draft = self.waiting.parent / f".{name}"
        draft.write_text(json.dumps(order))
        draft.rename(self.waiting / name)

    def withdraw(self) -> None:
        """Delete all orders that were not executed."""
        for path in self.waiting.iterdir():
            path.unlink(missing_ok=True)

    def carried_out(self) -> list[str]:
        """Return the names of the orders executed since the last call."""
        done = sorted(self.taken.iterdir())
        for path in done:
            path.unlink()
        return [path.name for path in done]

    def take(self, process: str, verbs: set[str]) -> dict[str, Any] | None:
        """Take an order for this process and one of these verbs; return None if there is none."""
        for path in self.waiting.iterdir():
            try:
                order: dict[str, Any] = json.loads(path.read_text())
                if order["verb"] in verbs and process.startswith(order["process"]):
                    path.rename(self.taken / path.name)
                    return order
            except FileNotFoundError:
                continue  # another process was faster
        return None


def lie_about_commits(folder: Path, process: str) -> None:
    """Patch COMMIT so that transactions with the verb of an order fail as the order says.

    `after`: the commit succeeds, but the connection is closed. `before`: the connection is closed before the commit.
    `hold`: the commit happens `seconds` later. Verbs are the functions of `app.runs.state.machine`, `append` and
    `checkpoint`.
    """
    import psycopg
    from sqlalchemy import Engine, event
    from sqlalchemy.engine.default import DefaultDialect

    from app.runs.events import log as event_log
    from app.runs.state import machine

    for name in (
        "create", "claim", "begin", "begin_save", "end_save", "complete", "fail", "cancel", "release", "retry", "reap",
        "request_stop", "renew", "mark_notified",
    ):  # fmt: skip
        setattr(machine, name, _marked(name, getattr(machine, name)))

    orders = Orders(folder)
    done: dict[int, set[str]] = {}
    """Verbs of the current transaction of each connection."""

    @event.listens_for(Engine, "before_execute")
    def note(connection: Any, clause: Any, _many: Any, _params: Any, options: Any) -> None:
        verb = options.get("chaos_verb")
        if clause is event_log._STORE:
            verb = "append"
        elif getattr(clause, "is_insert", False) and clause.table.name == "checkpoints":
            verb = "checkpoint"
        if verb:
            done.setdefault(id(connection.connection.dbapi_connection), set()).add(verb)

    commit, rollback = DefaultDialect.do_commit, DefaultDialect.do_rollback
    scanned = 0.0

    def do_commit(self: Any, connection: Any) -> None:
        nonlocal scanned
        verbs = done.pop(id(connection.dbapi_connection), set())
        order = None
        if verbs and time.monotonic() - scanned > _SCAN_SECONDS:
            scanned = time.monotonic()
            order = orders.take(process, verbs)
        if order is None:
            return commit(self, connection)
        if order["how"] == "hold":
            threading.Event().wait(order["seconds"])
            return commit(self, connection)
        if order["how"] == "after":
            commit(self, connection)
        connection.dbapi_connection.close()
        raise psycopg.OperationalError(f"injected: the server closed the connection unexpectedly ({order['how']})")

    def do_rollback(self: Any, connection: Any) -> None:
        done.pop(id(getattr(connection, "dbapi_connection", connection)), None)
        rollback(self, connection)

    DefaultDialect.do_commit = do_commit  # type: ignore[method-assign]
    DefaultDialect.do_rollback = do_rollback  # type: ignore[method-assign]


def _marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def statement(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named).execution_options(chaos_verb=name)

    return statement


def let_clock_jump(path: Path) -> None:
    """Patch the wall clock of this process so that it is ahead by the seconds in the file, if the file exists."""
    from app.infra import clock

    right_time, right_now = time.time, clock.utc_now
    seen, offset = 0, 0.0

    def ahead() -> float:
        nonlocal seen, offset
        try:
            changed = path.stat().st_mtime_ns
            if changed != seen:
                offset, seen = float(path.read_text() or 0), changed
        except (FileNotFoundError, ValueError):
            seen, offset = 0, 0.0
        return offset

    def jumped_now() -> Any:
        from datetime import timedelta

        return right_now() + timedelta(seconds=ahead())

    time.time = lambda: right_time() + ahead()
    time.time_ns = lambda: int((right_time() + ahead()) * 1e9)
    clock.utc_now = jumped_now


def note_lives(folder: Path) -> None:
    """Patch the start of training processes: each holds a lock on a file for life, which says whose process it is.

    One that finds a process of an earlier attempt of its run alive, on whichever host, says so in the file `overlaps`.
    """
    from worker.process import child

    prepare = child._prepare_process

    def prepare_and_note(start: child.LaunchSpec, *rest: Any) -> None:
        prepare(start, *rest)
        attempt_dir = Path(start.folder)
        run_id, attempt = attempt_dir.parent.name, int(attempt_dir.name.removeprefix("a"))
        hold(folder / f"{run_id}.{attempt}.{os.getpid()}")
        for path in folder.glob(f"{run_id}.*"):
            if int(path.name.split(".")[1]) < attempt and is_held(path):
                with (folder / "overlaps").open("a") as file:
                    file.write(f"process {os.getpid()} of attempt {attempt} began while {path.name} was alive\n")

    child._prepare_process = prepare_and_note


def hold(path: Path) -> None:
    """Lock a file until this process ends."""
    fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC), fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Return True if a process that has locked the file is alive."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def lock_nothing(name: str) -> None:
    """Patch `flock` so that locks on files of this name have no effect, as on storage without locks.

    A second host may not see the locks of the first. Then only leases and deadlines prevent two concurrent trainers of
    one run, and the journals of a campaign show if they do.
    """
    flock = fcntl.flock

    def flock_others(file: Any, operation: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        if Path(f"/proc/self/fd/{descriptor}").readlink().name != name:
            flock(file, operation)

    fcntl.flock = flock_others
