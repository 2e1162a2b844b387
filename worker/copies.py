"""Second copies of checkpoints, made by one thread of the worker while training goes on; the database is its memory."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, Executable
from sqlalchemy.exc import SQLAlchemyError

from app.checkpoints import copies
from app.events.log import NewEvent
from app.storage import Storage
from worker.remote import NotAsWritten, Remote, Stopped, Unreachable

if TYPE_CHECKING:
    from worker.lease import Lease
    from worker.writer import Writer

log = logging.getLogger(__name__)

_MOST_WAITING = 200
_SWEEP_SECONDS = 60.0
_NOTE_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_JOIN_SECONDS = 2.0

Say = Callable[[NewEvent], None]


class Copies:
    """What waits to be copied, newest first, and the thread that does it, one checkpoint at a time.

    Nothing is lost with the queue: what has no copy is found again in the database, by this worker or another one of
    the same storage, and so is what of a copy has to go.
    """

    def __init__(self, remote: Remote, storage: Storage, engine: Engine) -> None:
        self.remote = remote
        self._storage = storage
        self._engine = engine
        self._waiting: OrderedDict[str, Any] = OrderedDict()
        self._begun: set[str] = set()
        """Ids of checkpoints of whose copies this worker has begun to send something."""
        self._readers: dict[str, Say] = {}
        self._told: set[str] = set()
        """Runs that have been told of the present absence."""
        self._pause = 0.0
        """Above 0 while the second storage is away."""
        self._sweep_at = self._take_up_at = 0.0
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)

    def start(self) -> None:
        """Begin, with what others have left."""
        self._thread.start()

    def close(self) -> None:
        """End, at once: what is half sent is sent again by the next worker."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def add(self, checkpoint: Any) -> None:
        """Have it copied (`id`, `run_id`, `attempt`, `name`, `manifest_sha256`); never waits."""
        with self._changed:
            self._waiting[checkpoint.id] = checkpoint
            while len(self._waiting) > _MOST_WAITING:
                self._waiting.popitem(last=False)  # the database has it
            self._changed.notify_all()

    def tidy(self) -> None:
        """Have the copies removed of what has been let go; never waits."""
        with self._changed:
            self._sweep_at = 0.0
            self._changed.notify_all()

    @contextmanager
    def telling(self, run_id: str, say: Say) -> Iterator[None]:
        """For the time of the block, tell the run's log what concerns it."""
        with self._changed:
            self._readers[run_id] = say
        try:
            yield
        finally:
            with self._changed:
                self._readers.pop(run_id, None)
                self._told.discard(run_id)

    def settle(self, lease: "Lease", writer: "Writer", until: float) -> None:
        """Wait until the checkpoints of a run have their copies, at most until the monotonic time `until`.

        Not while the second storage is away, nor once the run is not ours. What has no copy then, its log is told.
        """
        run_id = lease.run_id
        left = self._unsent(run_id)
        if left:
            message = f"copying {_named(left)} to {self.remote.url}"
            told = {"phase": "copying", "done": None, "total": None, "message": message}
            writer.put(NewEvent.of("progress", time.time(), told))
        while left and not self._pause and not (lease.fenced or lease.expired) and time.monotonic() < until:
            with self._changed:
                self._changed.wait(_LOOK_SECONDS)
            left = self._unsent(run_id)
        if left:
            line = (
                f"There is no copy of {_named(left)} at {self.remote.url} yet: it is made as soon as a worker of this "
                "storage can reach it, and until then only workers of this storage can go on from there."
            )
            writer.put(_line(line, "warning"))

    def _unsent(self, run_id: str) -> list[str]:
        with self._changed:
            return [one.name for one in self._waiting.values() if one.run_id == run_id]

    def _work(self) -> None:
        while not self._ended.is_set():
            now: Any = None
            try:
                self._look_around()
                now = self._newest()
                if now is not None:
                    self._send(now)
                    self._answers()
            except Stopped:
                return
            except SQLAlchemyError as error:
                log.info("copies of checkpoints wait for the database: %s", error)
                self._ended.wait(_FIRST_PAUSE_SECONDS)
            except Unreachable as error:
                self._is_away(now.run_id if now else None, error)
            except Exception:
                # A mistake of ours in one copy must cost neither the others nor any training.
                log.exception("a checkpoint could not be copied: %s", now)
                if now is not None:
                    self._drop(now)
                self._ended.wait(_FIRST_PAUSE_SECONDS)

    def _look_around(self) -> None:
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_SECONDS
            try:
                self.sweep()
            except Unreachable as error:
                log.warning("copies that are not needed stay at %s for now: %s", self.remote.url, error)
        if time.monotonic() >= self._take_up_at:
            self._take_up_at = time.monotonic() + _SWEEP_SECONDS
            self.take_up()

    def sweep(self) -> None:
        """Remove the copies of what has been let go.

        Raises:
            Unreachable: some of it stays for now.
        """
        for one in self._rows(copies.to_remove()):
            self.remote.remove(self._folder(one))
            self._do(copies.removed(one.id))
        for one in self._rows(copies.runs_to_remove()):
            self.remote.remove(self._storage.run_dir(one.run_id))
            self._do(copies.run_removed(one.run_id))
            log.info("removed the copies of %s, which was deleted", one.run_id)

    def take_up(self) -> None:
        """Have copied what nobody copies."""
        for one in self._rows(copies.overdue()):
            with self._changed:
                if one.id not in self._waiting and len(self._waiting) < _MOST_WAITING and self._folder(one).is_dir():
                    self._waiting[one.id] = one
                    self._waiting.move_to_end(one.id, last=False)

    def _newest(self) -> Any:
        """What is to be sent next, once there is something; None when it is time to look around."""
        with self._changed:
            if not self._waiting and not self._ended.is_set():
                self._changed.wait(max(self._sweep_at - time.monotonic(), 0.0))
            return next(reversed(self._waiting.values()), None)

    def _send(self, one: Any) -> None:
        if self._do(copies.begin(one.id, one.id in self._begun)) is None:
            return self._drop(one)  # let go, or another worker's
        self._begun.add(one.id)
        noted = time.monotonic()

        def on_piece() -> None:
            nonlocal noted
            if self._ended.is_set():
                raise Stopped
            if time.monotonic() - noted > _NOTE_SECONDS:
                noted = time.monotonic()
                self._do(copies.begin(one.id, True))

        began = time.monotonic()
        try:
            self.remote.send(self._folder(one), one.manifest_sha256, on_piece)
        except NotAsWritten as error:
            log.warning("%s: no copy is made of a checkpoint that is not whole: %s", one.run_id, error)
            self.tidy()  # it may have gone because it was let go
            return self._drop(one)
        if self._do(copies.complete(one.id)) is None:
            self.remote.remove(self._folder(one))
            self._do(copies.removed(one.id))
        else:
            log.info("%s: %s copied in %.1f s", one.run_id, one.name, time.monotonic() - began)
        self._drop(one)

    def _drop(self, one: Any) -> None:
        with self._changed:
            self._waiting.pop(one.id, None)
            self._begun.discard(one.id)
            self._changed.notify_all()

    def _is_away(self, run_id: str | None, error: Unreachable) -> None:
        log.warning("checkpoints cannot be copied to %s: %s", self.remote.url, error)
        self._pause = min(max(self._pause * 2, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        with self._changed:
            say = self._readers.get(run_id or "")
            if say and run_id and run_id not in self._told:
                self._told.add(run_id)
                line = (
                    f"Checkpoints cannot be copied to {self.remote.url}: {error}. Training goes on, and what "
                    "is written here is copied once that answers; an operator finds the cause in the worker's log."
                )
                say(_line(line, "warning"))
            self._changed.notify_all()
        self._ended.wait(self._pause)

    def _answers(self) -> None:
        self._pause = 0.0
        with self._changed:
            for say in (self._readers[run_id] for run_id in self._told & self._readers.keys()):
                say(_line(f"Checkpoints are copied to {self.remote.url} again.", "info"))
            self._told.clear()

    def _folder(self, one: Any) -> Path:
        return self._storage.named_checkpoint(one.run_id, one.attempt, one.name)

    def _rows(self, statement: Executable) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(statement).all())

    def _do(self, statement: Executable) -> Any:
        with self._engine.begin() as connection:
            result = connection.execute(statement)
            return result.one_or_none() if result.returns_rows else None


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"


def _line(line: str, level: str) -> NewEvent:
    return NewEvent.of("log", time.time(), {"line": line, "stream": "anneal", "level": level})
