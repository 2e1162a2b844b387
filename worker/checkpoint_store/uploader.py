"""Sends checkpoints to the object store by one worker thread while training continues.

The state of each upload is in the database.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Executable, select
from sqlalchemy.exc import SQLAlchemyError

from app.infra.files.object_store import StoreUnavailable
from app.infra.storage import Storage
from app.runs.events.log import NewEvent
from app.runs.state.checkpoints import retention, uploads
from app.tables.administration.installation import Installation
from worker.checkpoint_files import manifest
from worker.checkpoint_store.remote_store import (
    LocalCheckpointCorrupt,
    LocalCheckpointMissing,
    RemoteStore,
    TransferCancelled,
)

log = logging.getLogger(__name__)

_MAX_QUEUED = 200
_SWEEP_SECONDS = 60.0
_NOTE_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_POLL_SECONDS = 0.1
_JOIN_SECONDS = 2.0

Say = Callable[[NewEvent], None]


class _NotWanted(Exception):
    """The checkpoint being sent is no longer wanted, or another worker is sending it."""


class CheckpointUploader:
    """Queue of checkpoints to send, newest first, and the thread that sends them one at a time.

    Nothing depends on the queue: checkpoints to send, and those to remove from the store, are found again in the
    database, by this worker or by another one of this machine.
    """

    def __init__(self, remote: RemoteStore, storage: Storage, engine: Engine) -> None:
        self.remote = remote
        self._storage = storage
        self._engine = engine
        self._waiting: OrderedDict[str, Any] = OrderedDict()
        self._started: dict[str, Any] = {}
        """Checkpoint id → last recorded `replica_started_at`, for uploads that this worker has started."""
        self._run_logs: dict[str, Say] = {}
        self._outage_reported: set[str] = set()
        """Runs whose log already reports the current outage."""
        self._pause = 0.0
        """Greater than 0 while the store is unavailable."""
        self._sweep_at = self._take_up_at = 0.0
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run_uploads, name="checkpoint-uploader", daemon=True)

    def start(self) -> None:
        """Start the thread, which first handles what other workers left unfinished."""
        self._thread.start()

    def close(self) -> None:
        """Stop at once; a partly sent checkpoint is sent again by the next worker."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def queue_checkpoint(self, checkpoint: Any) -> None:
        """Queue a checkpoint (`id`, `run_id`, `attempt`, `name`, `manifest_sha256`) to be sent; never waits."""
        with self._changed:
            self._waiting[checkpoint.id] = checkpoint
            while len(self._waiting) > _MAX_QUEUED:
                self._waiting.popitem(last=False)  # it is still listed in the database
            self._changed.notify_all()

    def schedule_sweep(self) -> None:
        """Schedule the removal of what is no longer needed in the store; never waits."""
        with self._changed:
            self._sweep_at = 0.0
            self._changed.notify_all()

    @contextmanager
    def log_to(self, run_id: str, say: Say) -> Iterator[None]:
        """Report events that concern the run to its log through `say`, for the duration of the block."""
        with self._changed:
            self._run_logs[run_id] = say
        try:
            yield
        finally:
            with self._changed:
                self._run_logs.pop(run_id, None)
                self._outage_reported.discard(run_id)

    def wait_until_sent(self, run_id: str, is_over: Callable[[], bool], put: Say, until: float) -> None:
        """Wait until the checkpoints of a run are in the store, at most until the monotonic time `until`.

        Returns early while the store is unavailable or once another worker owns the run. A warning in the run's log
        names the checkpoints that are not there by then.
        """
        left = self._unsent_names(run_id)
        if left:
            message = f"sending {_abbreviate_names(left)} to {self.remote.url}"
            progress = {"phase": "copying", "done": None, "total": None, "message": message}
            put(NewEvent.from_payload("progress", time.time(), progress))
        while left and not self._pause and not is_over() and time.monotonic() < until:
            with self._changed:
                self._changed.wait(_POLL_SECONDS)
            left = self._unsent_names(run_id)
        if left:
            line = (
                f"{self.remote.url} does not have {_abbreviate_names(left)} yet: this worker sends it once it can, and "
                "until then only workers of this machine can resume from there."
            )
            put(_log_event(line, "warning"))

    def _unsent_names(self, run_id: str) -> list[str]:
        with self._changed:
            return [one.name for one in self._waiting.values() if one.run_id == run_id]

    def _run_uploads(self) -> None:
        while not self._ended.is_set():
            now: Any = None
            try:
                self._run_periodic_work()
                now = self._next_checkpoint()
                if now is not None and self._send_checkpoint(now):
                    self._store_available()
            except TransferCancelled:
                return
            except SQLAlchemyError as error:
                log.info("the upload of checkpoints waits for the database: %s", error)
                self._ended.wait(_FIRST_PAUSE_SECONDS)
            except StoreUnavailable as error:
                self._store_unavailable(error)
            except OSError as error:
                log.warning("%s cannot be read now and is sent later: %s", now, error)
                if now is not None:
                    self._drop_checkpoint(now)
                self._ended.wait(_FIRST_PAUSE_SECONDS)
            except Exception:
                # A bug in one upload must affect neither the others nor any training.
                log.exception("a checkpoint could not be sent: %s", now)
                if now is not None:
                    self._drop_checkpoint(now)
                self._ended.wait(_FIRST_PAUSE_SECONDS)

    def _run_periodic_work(self) -> None:
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_SECONDS
            self.remove_unneeded()
        if time.monotonic() >= self._take_up_at:
            self._take_up_at = time.monotonic() + _SWEEP_SECONDS
            self.queue_overdue()

    def remove_unneeded(self) -> None:
        """Remove what is no longer needed in the store; what cannot be removed is skipped for now."""
        remaining: list[str] = []
        try:
            for checkpoint in self._rows_of_pages(uploads.to_remove, ""):
                if checkpoint.is_sent and self._started.get(checkpoint.id) != checkpoint.replica_started_at:
                    continue  # another worker sends it: what this worker has started, this same thread sends
                if self._try_remove(partial(self._folder_of, checkpoint), checkpoint.run_id, remaining):
                    self._execute(uploads.record_removal(checkpoint.id, checkpoint.replica_started_at))
                    self._started.pop(checkpoint.id, None)
            for run in self._rows_of_pages(uploads.runs_to_remove, ""):
                if self._try_remove(partial(self._storage.run_dir, run.id), run.id, remaining):
                    self._execute(uploads.run_removed(run.id))
                    log.info("removed what the storage had of %s, which was deleted", run.id)
        except StoreUnavailable as error:
            remaining.insert(0, f"all others ({error})")
        if remaining:
            log.warning(
                "checkpoints that are no longer needed remain at %s for now, of %s",
                self.remote.url,
                _abbreviate_names(remaining),
            )

    def _try_remove(self, folder: Callable[[], Path], run_id: str, remaining: list[str]) -> bool:
        """Return True if it was removed; raise `StoreUnavailable` if there is no point in trying others."""
        try:
            self.remote.remove_folder(folder())
        except Exception as error:  # the others do not wait for what is wrong with one
            if isinstance(error, StoreUnavailable) and error.is_silent:
                raise
            if not isinstance(error, StoreUnavailable | ValueError):  # `OutsideStorage` is a ValueError
                log.exception("a checkpoint of %s cannot be removed", run_id)
            remaining.append(f"{run_id} ({error})")
            return False
        return True

    def queue_overdue(self) -> None:
        """Queue checkpoints that no worker sends and that exist in this working copy."""
        for checkpoint in self._rows_of_pages(uploads.select_overdue, None):
            with self._changed:
                if len(self._waiting) >= _MAX_QUEUED:
                    return
                if checkpoint.id not in self._waiting and self._folder_of(checkpoint).is_dir():
                    self._waiting[checkpoint.id] = checkpoint
                    self._waiting.move_to_end(checkpoint.id, last=False)

    def _next_checkpoint(self) -> Any:
        """Return the newest queued checkpoint, waiting for one; None when it is time to query the database."""
        with self._changed:
            if not self._waiting and not self._ended.is_set():
                self._changed.wait(max(self._sweep_at - time.monotonic(), 0.0))
            return next(reversed(self._waiting.values()), None)

    def _send_checkpoint(self, checkpoint: Any) -> bool:
        """Send one checkpoint; return True if it is complete, False if it is no longer to be sent.

        Raises:
            StoreUnavailable, SQLAlchemyError, OSError: It cannot be sent now.
        """
        # This worker may have started while the store did not answer.
        self.remote.objects.check_owner(next((row.id for row in self._fetch_rows(select(Installation.id))), None))
        began = noted = time.monotonic()
        lease_epoch = 0

        def note_progress() -> None:
            nonlocal lease_epoch, noted
            row = self._execute(uploads.claim_upload(checkpoint.id, self._started.get(checkpoint.id)))
            if row is None:
                raise _NotWanted
            self._started[checkpoint.id], lease_epoch, noted = row.replica_started_at, row.lease_epoch, time.monotonic()

        def on_piece() -> None:
            if self._ended.is_set():
                raise TransferCancelled
            if time.monotonic() - noted > _NOTE_SECONDS:
                note_progress()

        try:
            note_progress()
            self.remote.send_checkpoint(self._folder_of(checkpoint), checkpoint.manifest_sha256, on_piece)
            if self._execute(uploads.mark_complete(checkpoint.id, self._started[checkpoint.id])) is None:
                raise _NotWanted
        except _NotWanted:
            self._discard_unwanted(checkpoint)
        except LocalCheckpointMissing:
            log.info("%s: %s no longer exists and is not sent", checkpoint.run_id, checkpoint.name)
            self._discard_unwanted(checkpoint)
        except LocalCheckpointCorrupt as error:
            log.warning("%s: a corrupt checkpoint is not sent: %s", checkpoint.run_id, error)
            with suppress(_NotWanted):
                note_progress()  # it may be incomplete because it was released and is being removed
                self._check_corrupt(checkpoint, lease_epoch, on_piece)
            self._discard_unwanted(checkpoint)
        else:
            log.info("%s: %s sent in %.1f s", checkpoint.run_id, checkpoint.name, time.monotonic() - began)
            self._drop_checkpoint(checkpoint)
            return True
        return False

    def _check_corrupt(self, checkpoint: Any, lease_epoch: int, on_piece: Callable[[], None]) -> None:
        """Mark a corrupt checkpoint, unless another worker owns its run by now or the checkpoint was released."""
        problems = manifest.verify(self._folder_of(checkpoint), checkpoint.manifest_sha256, on_piece)
        if not problems or not self._folder_of(checkpoint).exists():
            return
        why = "; ".join(problems[:3])
        with self._engine.begin() as connection:
            is_ours = connection.execute(
                uploads.claim_upload(checkpoint.id, self._started[checkpoint.id])
            ).one_or_none()
            if is_ours is None:
                return
            self._started[checkpoint.id] = is_ours.replica_started_at
            is_marked = (
                connection.execute(retention.mark_corrupt(checkpoint.id, why, checkpoint.run_id, lease_epoch)).rowcount
                == 1
            )
        reason = f"checkpoint {checkpoint.id} (step {checkpoint.step}) cannot be resumed from and is not sent: {why}"
        log.warning("%s: %s", checkpoint.run_id, reason)
        with self._changed:
            say = self._run_logs.get(checkpoint.run_id)
            if say and is_marked:
                say(_log_event(reason, "warning"))

    def _discard_unwanted(self, checkpoint: Any) -> None:
        """Remove what this worker has sent of an unwanted checkpoint, unless another worker has continued it."""
        noted = self._started.get(checkpoint.id)
        if noted is not None and self._execute(uploads.owned_by_other_worker(checkpoint.id, noted)) is None:
            self.remote.remove_folder(self._folder_of(checkpoint))
            self._execute(uploads.record_removal(checkpoint.id, noted))
        self._drop_checkpoint(checkpoint)

    def _drop_checkpoint(self, checkpoint: Any) -> None:
        with self._changed:
            self._waiting.pop(checkpoint.id, None)
            self._started.pop(checkpoint.id, None)
            self._changed.notify_all()

    def _store_unavailable(self, error: StoreUnavailable) -> None:
        log.warning("checkpoints cannot be sent to %s: %s", self.remote.url, error)
        self._pause = min(max(self._pause * 2, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        line = (
            f"Checkpoints cannot be sent to {self.remote.url}: {error}. Training continues, and checkpoints written "
            "here are sent once that works again; an operator finds the cause in the worker's log."
        )
        with self._changed:
            waiting = {one.run_id for one in self._waiting.values()}
            for run_id in (waiting & self._run_logs.keys()) - self._outage_reported:
                self._outage_reported.add(run_id)
                self._run_logs[run_id](_log_event(line, "warning"))
            self._changed.notify_all()
        self._ended.wait(self._pause)

    def _store_available(self) -> None:
        self._pause = 0.0
        with self._changed:
            for say in (self._run_logs[run_id] for run_id in self._outage_reported & self._run_logs.keys()):
                say(_log_event(f"Checkpoints are sent to {self.remote.url} again.", "info"))
            self._outage_reported.clear()

    def _folder_of(self, checkpoint: Any) -> Path:
        return self._storage.named_checkpoint(checkpoint.run_id, checkpoint.attempt, checkpoint.name)

    def _rows_of_pages(self, page: Callable[[Any], Executable], last: str | None) -> Iterator[Any]:
        """Yield the rows of all pages; each query ends before its rows are processed."""
        while rows := self._fetch_rows(page(last)):
            yield from rows
            last = rows[-1].id

    def _fetch_rows(self, statement: Executable) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(statement).all())

    def _execute(self, statement: Executable) -> Any:
        with self._engine.begin() as connection:
            result = connection.execute(statement)
            return result.one_or_none() if result.returns_rows else None


def _abbreviate_names(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"


def _log_event(line: str, level: str) -> NewEvent:
    return NewEvent.from_payload("log", time.time(), {"line": line, "stream": "anneal", "level": level})
