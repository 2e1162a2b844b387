"""Sends the output and the records of an attempt to the object store, before the run's end is stored."""

import logging
import math
import time
from collections.abc import Callable

from sqlalchemy import Executable, and_, exists, update

from app.contracts.attempt.records import is_record
from app.infra.files.object_store import StoreUnavailable
from app.runs.events.log import NewEvent
from app.runs.state import machine
from app.tables.runs import Attempt, Run
from worker.attempts.outcome import could_not_start
from worker.checkpoint_store.remote_store import RemoteStore, TransferCancelled
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.event_writer import EventWriter
from worker.lease import Lease

log = logging.getLogger(__name__)

STORAGE_UNAVAILABLE = "storage_unavailable"
"""Code of a failure whose cause is the object store."""
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 15.0
_RETRY_SECONDS = 30.0
_NOTE_SECONDS = 5.0


def deliver(
    context: WorkerContext, run: ClaimedRun, lease: Lease, writer: EventWriter, ending: Executable, *, has_output: bool
) -> Executable:
    """Send what the attempt has written; return `ending`, or what follows if the output cannot be sent.

    A run is not completed while its output is only here. While the store is unavailable, the device is kept and sending
    is tried again for the grace period; then the run is tried again, as after a loss, from its last checkpoint.
    A stop ends these tries. The records decide nothing: they are sent once.
    """
    if context.working_copy is None or context.remote is None:
        return ending
    delivery = _Delivery(context, context.remote, run, lease, writer)
    if not has_output:
        delivery.records_if_possible()
        return ending
    try:
        delivery.output()
    except TransferCancelled:
        if lease.fenced:
            return ending  # another worker owns the run, so it is not stored
        reason = "released: the worker shut down before the output was sent to the storage"
        return machine.release(run.id, run.lease_epoch, reason)
    except StoreUnavailable as error:
        if lease.stop:
            return machine.cancel(run.id, run.lease_epoch)
        reason = f"its output cannot be sent to {context.remote.url}: {error}; an operator finds the cause in the "
        reason += "worker's log. Resume the run once the storage works: it continues from its last checkpoint"
        return machine.retry(run.id, run.lease_epoch, reason, _RETRY_SECONDS, STORAGE_UNAVAILABLE)
    except (OSError, ValueError) as error:  # `OutsideStorage` is a ValueError
        log.exception("%s: attempt %d", run.id, run.attempt)
        return could_not_start(context, run, f"its output cannot be read: {error}")
    delivery.records_if_possible()
    return ending


class _Delivery:
    """Transfer of the files of one attempt."""

    def __init__(
        self, context: WorkerContext, remote: RemoteStore, run: ClaimedRun, lease: Lease, writer: EventWriter
    ) -> None:
        self._context, self._remote = context, remote
        self._run, self._lease, self._writer = run, lease, writer
        self._until = math.inf
        """Monotonic time at which sending ends."""
        self._sent: dict[str, tuple[int, str]] = {}
        self._pieces = 0
        """Pieces that this try has read of the output."""
        self._furthest = (0, 0)
        """Files that were sent, and pieces of the next ones that were read, in the try that came furthest."""
        self._advanced_at = time.monotonic()
        """Monotonic time at which a try last came further than all before.

        That a piece was read says nothing: a store that is down accepts none, but its client buffers the first ones."""
        self._noted_at = 0.0

    def output(self) -> None:
        """Send the output, and record it.

        Raises:
            StoreUnavailable, TransferCancelled, OSError, ValueError: It is not sent.
        """
        storage, of = self._context.storage, (self._run.id, self._run.attempt)
        folder, described = storage.output_dir(*of), storage.output_manifest(*of)
        sha256 = self._persistently(
            lambda: self._remote.send_described(folder, described, lambda _: True, self._sent, self._on_output)
        )
        self._record(output_sha256=sha256)

    def records_if_possible(self) -> None:
        """Send the records once, for the grace period at most; a warning in the run's log says why they were not sent.

        A run whose work is discarded needs none.
        """
        storage, of = self._context.storage, (self._run.id, self._run.attempt)
        folder, described = storage.attempt_dir(*of), storage.records_manifest(*of)
        if not folder.is_dir() or (self._lease.stop and self._lease.stop.mode == "discard"):
            return
        self._until = time.monotonic() + self._context.settings.save_grace_seconds
        try:
            sha256 = self._remote.send_described(folder, described, is_record, {}, self._on_piece)
        except (TransferCancelled, StoreUnavailable, OSError, ValueError) as error:
            line = f"The records of this attempt could not be sent to {self._remote.url}: {error}."
            self._writer.put(NewEvent.of("log", time.time(), {"line": line, "stream": "anneal", "level": "warning"}))
        else:
            self._record(records_sha256=sha256)

    def _persistently(self, send: Callable[[], str]) -> str:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            self._pieces = 0
            try:
                return send()
            except StoreUnavailable as error:
                log.warning("%s: its files cannot be sent now: %s", self._run.id, error)
                silence = time.monotonic() - self._advanced_at
                if self._lease.stop or silence > self._context.settings.save_grace_seconds:
                    raise
            self._check()
            until = time.monotonic() + pause
            while time.monotonic() < until and not self._lease.stop:
                self._check()
                time.sleep(min(0.1, pause))
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _check(self) -> None:
        """Raise `TransferCancelled` if another worker owns the run, or if the grace period of a drain is over.

        An expired lease is no reason: no trainer is left, and this worker may own the run once the database answers.
        """
        is_over = time.monotonic() > self._context.drained_at + self._context.settings.save_grace_seconds
        if self._lease.fenced or is_over:
            raise TransferCancelled("the run has another owner, or the worker is to end")
        if time.monotonic() >= self._until:
            raise TransferCancelled("it took longer than the grace period")

    def _on_output(self) -> None:
        self._pieces += 1
        reached = (len(self._sent), self._pieces)
        if reached > self._furthest:
            self._furthest, self._advanced_at = reached, time.monotonic()
        self._on_piece()

    def _on_piece(self) -> None:
        self._check()
        if time.monotonic() - self._noted_at > _NOTE_SECONDS:
            self._noted_at = time.monotonic()
            message = f"sending the output to {self._remote.url}"
            progress = {"phase": "copying", "done": None, "total": None, "message": message}
            self._writer.put(NewEvent.of("progress", time.time(), progress))

    def _record(self, **values: str) -> None:
        """Store the hash of a manifest in the attempt's row, unless another worker owns the run by now."""
        is_ours = exists().where(Run.id == self._run.id, Run.lease_epoch == self._run.lease_epoch)
        of_attempt = and_(Attempt.run_id == self._run.id, Attempt.attempt == self._run.attempt)
        statement = update(Attempt).where(of_attempt, is_ours).values(**values)

        def write() -> None:
            with self._context.engine.begin() as connection:
                connection.execute(statement)

        self._writer.wait_past_lease()
        self._writer.persist(write)
