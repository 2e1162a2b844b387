"""Sends the output and the records of an attempt to the object store, before the run's end is stored."""

import logging
import math
import time
from collections.abc import Callable

from sqlalchemy import Executable, and_, exists, update

from anneal.contracts.attempt.records import is_record
from app.infra.files.object_store import StoreUnavailable
from app.runs.events.log import NewEvent
from app.runs.state import machine
from app.tables.runs import Attempt, Run
from worker.attempts.job_error import STORAGE_UNAVAILABLE
from worker.attempts.outcome import failed_start_transition
from worker.checkpoint_store.remote_store import RemoteStore, TransferCancelled
from worker.checkpoint_store.uploader import CheckpointUploader
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.event_writer import EventWriter
from worker.lease import Lease

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_REQUEUE_SECONDS = 30.0
_NOTE_SECONDS = 5.0
_KEPT = (
    "Training is complete. This worker keeps the output and the device, and sends it once the storage works; an "
    "operator finds the cause in the worker's log."
)


class Delivery:
    """Transfer of the files of one attempt to the object store."""

    def __init__(
        self, context: WorkerContext, remote: RemoteStore, run: ClaimedRun, lease: Lease, writer: EventWriter
    ) -> None:
        self._context, self._remote = context, remote
        self._run, self._lease, self._writer = run, lease, writer
        self._until = math.inf
        """Monotonic time at which sending ends."""
        self._sent: dict[str, tuple[int, str]] = {}
        self._chunks = 0
        """Pieces that this try has read of the output."""
        self._furthest = (0, 0)
        """Files that were sent, and pieces of the next ones that were read, in the try that came furthest."""
        self._advanced_at = time.monotonic()
        """Monotonic time at which a try last came further than all before.

        That a piece was read says nothing: a store that is down accepts none, but its client buffers the first ones."""
        self._noted_at = 0.0
        self._preempted_at = math.inf
        """Monotonic time at which this worker was seen to be asked to make room for another run."""

    def wait_for_uploads(self, uploader: CheckpointUploader) -> None:
        """Wait until the checkpoints that the attempt has saved are in the store, unless none of them is wanted."""
        context, lease = self._context, self._lease
        if lease.stop is None or lease.stop.mode != "discard":
            self._writer.drain()  # every saved checkpoint is queued for its upload now
            until = min(context.drained_at, time.monotonic()) + context.settings.save_grace_seconds
            uploader.wait_until_sent(
                lease.run_id, lambda: lease.fenced or lease.expired, self._writer.enqueue_item, until
            )

    def deliver(self, transition: Executable, *, has_output: bool) -> Executable:
        """Send what the attempt has written; return `transition`, or what follows if the output cannot be sent.

        A run is not completed while its output is only here. While the store is unavailable, the lease and the device
        are kept, and sending is tried again for `ANNEAL_DELIVERY_SECONDS` without progress. Then the run returns to the
        queue, which counts as a loss only if the store answers. A stop ends these tries. The records decide nothing:
        they are sent once.
        """
        if has_output:
            try:
                self.send_output()
            except (TransferCancelled, StoreUnavailable, OSError, ValueError) as error:
                return self._transition_after(error, transition)
        self.send_records_if_possible()
        return transition

    def _transition_after(self, error: Exception, transition: Executable) -> Executable:
        """Return what follows from an output that is not sent."""
        run, lease = self._run, self._lease
        match error:
            case TransferCancelled() if lease.fenced:
                pass  # another worker owns the run, so nothing is stored
            case TransferCancelled():
                why = "the worker shut down"
                if lease.preempted_for:
                    why = f"preempted for run {lease.preempted_for}, which has a higher priority,"
                reason = f"released: {why} before the output was sent to the storage"
                transition = machine.release(run.id, run.lease_epoch, reason)
            case StoreUnavailable() if lease.stop:
                transition = machine.cancel(run.id, run.lease_epoch)
            case StoreUnavailable(is_silent=True):
                reason = f"released: its output could not be sent to {self._remote.url} for "
                reason += (
                    f"{self._context.settings.delivery_seconds:,.0f} s ({error}); once the storage works, another "
                )
                reason += "attempt continues from the last checkpoint that is there or on its worker"
                transition = machine.release(run.id, run.lease_epoch, reason, _REQUEUE_SECONDS)
            case StoreUnavailable():
                # It answers, so the next attempt would start, and so on without an end.
                reason = f"its output cannot be sent to {self._remote.url}: {error}; an operator finds the cause in "
                reason += "the worker's log. Resume the run once the storage works"
                transition = machine.retry(run.id, run.lease_epoch, reason, _REQUEUE_SECONDS, STORAGE_UNAVAILABLE)
            case _:  # `OSError` or `ValueError`, such as `OutsideStorage`
                log.error("%s: attempt %d", run.id, run.attempt, exc_info=error)
                transition = failed_start_transition(self._context.health, run, f"its output cannot be read: {error}")
        return transition

    def send_output(self) -> None:
        """Send the output, and record it.

        Raises:
            StoreUnavailable, TransferCancelled, OSError, ValueError: It is not sent.
        """
        self._advanced_at = time.monotonic()  # the uploads before may have waited for the same store
        storage, attempt_key = self._context.storage, (self._run.id, self._run.attempt)
        folder, described = storage.output_dir(*attempt_key), storage.output_manifest(*attempt_key)
        sha256 = self._send_with_retries(
            lambda: self._remote.send_described(folder, described, lambda _: True, self._sent, self._on_output)
        )
        self._store_hashes(output_sha256=sha256)

    def send_records_if_possible(self) -> None:
        """Send the records once, for the grace period at most; a warning in the run's log says why they were not sent.

        A run whose work is discarded needs none.
        """
        storage, attempt_key = self._context.storage, (self._run.id, self._run.attempt)
        folder, described = storage.attempt_dir(*attempt_key), storage.records_manifest(*attempt_key)
        if not folder.is_dir() or (self._lease.stop and self._lease.stop.mode == "discard"):
            return
        self._until = time.monotonic() + self._context.settings.save_grace_seconds
        try:
            sha256 = self._remote.send_described(folder, described, is_record, {}, self._on_chunk)
        except (TransferCancelled, StoreUnavailable, OSError, ValueError) as error:
            self._log_line(f"The records of this attempt could not be sent to {self._remote.url}: {error}.", "warning")
        else:
            self._store_hashes(records_sha256=sha256)

    def _send_with_retries(self, send: Callable[[], str]) -> str:
        pause = _FIRST_PAUSE_SECONDS
        is_reported = False
        while True:
            self._chunks = 0
            try:
                sha256 = send()
            except StoreUnavailable as error:
                log.warning("%s: its output cannot be sent now: %s", self._run.id, error)
                left = self._context.settings.delivery_seconds - (time.monotonic() - self._advanced_at)
                if self._lease.stop or left <= 0:
                    raise
                if not is_reported:
                    self._log_line(f"The output cannot be sent to {self._remote.url}: {error}. {_KEPT}", "warning")
                    is_reported = True
                pause = min(pause, left)
                message = f"the storage does not take the output ({error}); next try in {pause:.0f} s"
                self._report_progress(f"{message}, for another {left:,.0f} s at most")
            else:
                if is_reported:
                    self._log_line(f"The output was sent to {self._remote.url}.", "info")
                return sha256
            until = time.monotonic() + pause
            while time.monotonic() < until and not self._lease.stop:
                self._raise_if_cancelled()
                time.sleep(min(0.1, pause))
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _raise_if_cancelled(self) -> None:
        """Raise `TransferCancelled` if another worker owns the run, or a drain's or preemption's grace period is over.

        An expired lease is no reason: no trainer is left, and this worker may own the run once the database answers.
        """
        if self._lease.preempted_for:
            self._preempted_at = min(self._preempted_at, time.monotonic())
        requested_at = min(self._context.drained_at, self._preempted_at)
        is_over = time.monotonic() > requested_at + self._context.settings.save_grace_seconds
        if self._lease.fenced or is_over:
            raise TransferCancelled("the run has another owner, or is to be released")
        if time.monotonic() >= self._until:
            raise TransferCancelled("it took longer than the grace period")

    def _on_output(self) -> None:
        self._chunks += 1
        reached = (len(self._sent), self._chunks)
        if reached > self._furthest:
            self._furthest, self._advanced_at = reached, time.monotonic()
        self._on_chunk()

    def _on_chunk(self) -> None:
        self._raise_if_cancelled()
        if time.monotonic() - self._noted_at > _NOTE_SECONDS:
            self._noted_at = time.monotonic()
            self._report_progress(f"sending the output to {self._remote.url}")

    def _report_progress(self, message: str) -> None:
        progress = {"phase": "copying", "done": None, "total": None, "message": message}
        self._writer.enqueue_item(NewEvent.from_payload("progress", time.time(), progress))

    def _log_line(self, line: str, level: str) -> None:
        self._writer.enqueue_item(
            NewEvent.from_payload("log", time.time(), {"line": line, "stream": "anneal", "level": level})
        )

    def _store_hashes(self, **values: str) -> None:
        """Store the hash of a manifest in the attempt's row, unless another worker owns the run by now."""
        is_ours = exists().where(Run.id == self._run.id, Run.lease_epoch == self._run.lease_epoch)
        of_attempt = and_(Attempt.run_id == self._run.id, Attempt.attempt == self._run.attempt)
        statement = update(Attempt).where(of_attempt, is_ours).values(**values)

        def update_attempt() -> None:
            with self._context.engine.begin() as connection:
                connection.execute(statement)

        self._writer.wait_past_lease()
        self._writer.retry_during_outage(update_attempt)
