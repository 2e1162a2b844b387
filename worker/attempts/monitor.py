"""Monitor of a live training process: handles its output, sends it control messages and ends it."""

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anneal.contracts.attempt.failure_report import KillReason
from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.stop import StopRequest
from app.runs.events.log import LeaseFenced
from worker.attempts.memory_watch import MemoryWatch
from worker.attempts.outcome import exit_of
from worker.context import WorkerContext
from worker.ingest.event_writer import EventWriter
from worker.ingest.record_handler import RecordHandler
from worker.lease import Lease
from worker.process.training_group import TrainingGroup
from worker.process.training_process import Exit
from worker.telemetry import DeviceFeed

_NO_SAVE_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_CAUSE_SECONDS = 5.0
"""Seconds that the ranks of this host have to end by themselves once those of another have lost the connection."""
_LOOK_SECONDS = 1.0


def receive_output(processes: TrainingGroup, record_handler: RecordHandler, *, is_blocked: bool = False) -> bool:
    """Handle what the processes send within 50 ms; return False if they must wait before more is read."""
    if is_blocked or record_handler.is_over_budget:
        time.sleep(_POLL_SECONDS)  # unread output makes the trainer wait, so memory stays bounded
        return False
    processes.wait(_POLL_SECONDS)
    for rank, pieces in processes.receive():
        record_handler.handle_output(pieces, rank)
    return True


def kill_and_drain(processes: TrainingGroup, record_handler: RecordHandler) -> None:
    """Kill the processes and what they left behind in their sessions, and handle the rest of their output."""
    processes.kill()
    for rank, pieces in processes.drain():
        record_handler.handle_output(pieces, rank)


class Monitor:
    """Monitor of the training processes of an attempt, from their start to their end; used by its supervisor alone.

    Every 50 ms at the latest it passes output to the record handler, unless the writer's queue is full or a process
    reports too much, samples memory, stores device telemetry, checks lease and events for problems, and forwards stop
    requests and actions of the lease. It kills the processes if the lease expires, if nothing arrives for
    `hang_seconds`, or if a stop outlasts its grace period: that of the request, else `save_grace_seconds`, or 5 s if no
    checkpoint is wanted. Before training has started there is none.
    """

    def __init__(
        self,
        context: WorkerContext,
        lease: Lease,
        writer: EventWriter,
        record_handler: RecordHandler,
        processes: TrainingGroup,
        memory_watch: MemoryWatch,
        device_feeds: Sequence[DeviceFeed],
        members: Sequence[str] = (),
    ) -> None:
        """Monitor the processes of this host; `members` are the workers of the other hosts of the run."""
        self._context = context
        self._lease = lease
        self._writer = writer
        self._record_handler = record_handler
        self._state = record_handler.state
        self._processes = processes
        self._memory_watch = memory_watch
        self._device_feeds = device_feeds
        self._members = members
        self._lost_at: float | None = None
        self._stop_requested_at: float | None = None
        self._grace = 0.0
        self._sent_stop: StopRequest | None = None
        self._has_requested_checkpoint = False
        self._sent_actions: set[str] = set()
        """Ids of the actions already sent."""
        self._backpressure_at = time.monotonic()

    def run_until_exit(self) -> Exit:
        """Handle output until the processes have ended; return their end.

        Raises:
            LeaseFenced: This worker no longer owns the run; the processes have been killed.
        """
        killed_for: KillReason | None = None
        while (ended := self._poll_exit()) is None and killed_for is None:
            self._receive_output()
            self._memory_watch.sample_if_due(self._state.phase)
            for feed in self._device_feeds:
                feed.put_new_report()
            if self._lease.fenced:
                self._processes.kill()
                raise LeaseFenced(self._lease.run_id)
            self._writer.raise_if_failed()
            killed_for = self._reason_to_kill()
        hang = self._describe_hang() if killed_for == "hang" else {}
        kill_and_drain(self._processes, self._record_handler)
        if ended is not None and ended.peer_lost and self._members:
            ended = self._wait_for_cause(ended)
        for part in self._lease.ended_parts:
            if part.end is not None:
                self._record_handler.take_part_end(part.end)
        self._record_handler.flush_output()
        end = ended or self._processes.poll() or Exit(signal=signal.SIGKILL)
        return replace(end, killed_for=killed_for, **hang)

    def _describe_hang(self) -> dict[str, Any]:
        """Return the ranks that are suspended, and before training those for which all others wait."""
        parts = self._lease.active_parts
        suspended = (*self._processes.suspended(), *(rank for part in parts for rank in part.activity.suspended))
        waiting = {*self._state.waiting, *(rank for part in parts for rank in part.activity.waiting)}
        waiting -= {*suspended}  # it may have been suspended in a wait, and then the others wait for it
        own = dict.fromkeys(range(len(self._processes.identities)), "")
        others = {
            rank: f" on worker {part.worker_id}"
            for part in parts
            for rank in range(part.first_rank, part.first_rank + part.devices)
        }
        behind = [f"rank {rank}{where}" for rank, where in {**own, **others}.items() if rank not in waiting]
        is_known = waiting and not self._state.training_started
        return {"suspended": suspended, "behind": tuple(behind) if is_known else ()}

    def _poll_exit(self) -> Exit | None:
        """Return the end of the processes, or of a part on another host that ends them."""
        ended = self._processes.poll()
        if not self._members or (ended is not None and not ended.peer_lost):
            return ended
        if (cause := self._causing_exit()) is not None or ended is not None:
            return cause or ended
        if not any(part.end is not None and part.end.peer_lost for part in self._lease.ended_parts):
            return None
        self._lost_at = self._lost_at or time.monotonic()
        return Exit(peer_lost=True) if time.monotonic() - self._lost_at > _CAUSE_SECONDS else None

    def _causing_exit(self) -> Exit | None:
        """Return the first end of a part on another host that causes the end of the run."""
        causes = (exit_of(part) for part in self._lease.ended_parts)
        return next((cause for cause in causes if cause is not None), None)

    def _wait_for_cause(self, ended: Exit) -> Exit:
        """Return the end on another host that made the others lose the connection, or `ended` if none is stored.

        That of a lost worker becomes known only when the lease on its part has expired.

        Raises:
            LeaseFenced: This worker no longer owns the run.
        """
        until = time.monotonic() + self._context.settings.lease_seconds
        while (cause := self._causing_exit()) is None and len(self._lease.ended_parts) < len(self._members):
            if self._lease.fenced:
                raise LeaseFenced(self._lease.run_id)
            is_asked = self._lease.stop or self._lease.leaving or self._context.draining.is_set()
            if is_asked or self._lease.expired or time.monotonic() > until:
                break
            self._lease.renew_now()
            time.sleep(min(_LOOK_SECONDS, self._context.settings.renew_seconds))
        return cause or ended

    def _receive_output(self) -> None:
        if not receive_output(self._processes, self._record_handler, is_blocked=self._writer.is_full):
            self._backpressure_at = time.monotonic()

    def _reason_to_kill(self) -> KillReason | None:
        if self._lease.expired:
            return "lease"
        silent = time.monotonic() - max(self._state.last_output_at, self._backpressure_at)
        if not self._state.training_started:  # the ranks here may wait for those of another host
            silent = min([silent, *(part.activity.silent_seconds for part in self._lease.active_parts)])
        if silent > self._context.settings.hang_seconds:
            return "hang"
        is_asked = self._lease.stop or self._lease.preempted_for or self._lease.leaving
        if is_asked or self._context.draining.is_set():
            return self._enforce_stop()
        self._save_during_outage()
        self._send_requests()
        return None

    def _enforce_stop(self) -> KillReason | None:
        """Send a stop request (or that the run is to be released) and enforce it at the end of the grace period."""
        stop = self._lease.stop or StopRequest("checkpoint", "drain")
        grace = _NO_SAVE_GRACE_SECONDS if stop.mode == "discard" else self._context.settings.save_grace_seconds
        grace = grace if stop.grace_seconds is None else stop.grace_seconds
        now = time.monotonic()
        if self._stop_requested_at is None or grace < self._grace:
            self._stop_requested_at = now  # a request that keeps less than before gets its own grace period
        self._grace = grace
        self._send_stop(stop)
        if not self._state.training_started:
            return stop.why  # nothing to save
        if now - self._stop_requested_at <= grace:
            return None
        self._record_handler.log.log_line(
            f"the training process did not stop within {grace:.0f} s and was killed", "warning"
        )
        return stop.why

    def _send_requests(self) -> None:
        """Send newly requested actions to the trainer; retry at the next poll if its socket is full."""
        if self._lease.requested_stop is not None:
            self._send_stop(self._lease.requested_stop)
        for action in self._lease.actions:
            if action.id in self._sent_actions:
                continue
            if not self._processes.send(ControlMessage(action=action)):
                break  # later actions must not overtake it
            self._sent_actions.add(action.id)

    def _send_stop(self, stop: StopRequest) -> None:
        """Send a stop request, once, and again when it changes."""
        if stop != self._sent_stop and self._processes.send(ControlMessage(stop=stop)):
            self._sent_stop = stop

    def _save_during_outage(self) -> None:
        """Request a checkpoint while there is time if the database does not answer for long; once per outage."""
        is_silent = self._lease.silent_seconds >= self._context.settings.save_after_seconds
        if is_silent and not self._has_requested_checkpoint and self._state.training_started:
            self._processes.send(ControlMessage(checkpoint=True))
        self._has_requested_checkpoint = is_silent
