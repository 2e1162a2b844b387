"""Lease on a run, renewed from its own thread, which also receives stop requests and actions."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from sqlalchemy import Executable, Row
from sqlalchemy.exc import SQLAlchemyError

from anneal.contracts.attempt.messages import ActionRequest, ControlMessage
from anneal.contracts.attempt.part_activity import PartActivity
from anneal.contracts.attempt.part_end import PartEnd
from anneal.contracts.stop import StopRequest
from app.infra.clock import since_boot
from app.infra.logs.log_setup import with_current_context
from app.runs.state import machine, parts
from worker.context import WorkerContext
from worker.process.training_group import TrainingGroup

log = logging.getLogger(__name__)


_JOIN_SECONDS = 1.0


@dataclass(frozen=True)
class EndedPart:
    """Part of the run on another host that has ended, or whose lease has expired."""

    worker_id: str
    first_rank: int
    devices: int
    end: PartEnd | None
    """None: its worker was lost."""


@dataclass(frozen=True)
class ActivePart:
    """Part of the run on another host, as of the last renewals of both; known until training starts."""

    worker_id: str
    first_rank: int
    devices: int
    activity: PartActivity


class Lease:
    """Lease on a run, which this worker owns as long as renewals reach Postgres in time.

    The trainer's own timer counts from the same moment as the lease. Both count the seconds since this machine was
    booted, those of its sleep included, and a renewal counts from when it was *sent*: however long the response took,
    the trainer is dead before the lease, which the database counts from later, can have expired. Renewal continues
    after that moment: it only keeps other workers away for longer, while the output of the dead trainer is stored.
    """

    def __init__(self, context: WorkerContext, run_id: str, lease_epoch: int, sent: float) -> None:
        self.run_id = run_id
        self.lease_epoch = lease_epoch
        self.requested_stop: StopRequest | None = None
        """Stop in effect when the lease was last renewed, at once or at the end of the epoch."""
        self.actions: list[ActionRequest] = []
        """Actions still pending when the lease was last renewed, to be done between two steps; oldest first."""
        self.preempted_for: str | None = None
        """Run for which this one is to save and return to the queue; once it is set, it stays."""
        self.ended_parts: list[EndedPart] = []
        """Parts of the run on other hosts that have ended, in this order."""
        self.active_parts: list[ActivePart] = []
        """Parts of the run on other hosts whose processes have not ended."""
        self.leaving: str | None = None
        """Worker of a part that is shutting down, so that the run is to save and return to the queue."""
        self.fenced = False
        """True if this worker no longer owns the run."""
        self._context = context
        self._sent = sent
        self._longest_silence = 0.0
        self._processes: TrainingGroup | None = None
        self._now = threading.Event()
        self._over = False
        self._thread = threading.Thread(
            target=with_current_context(self._keep_renewed), name=f"lease {run_id}", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()  # fails where the user may have no more threads
        self._context.leases.hold(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._now.set()
        # A thread blocked in a statement of a frozen server must not keep the worker from ending.
        self._thread.join(_JOIN_SECONDS)
        self._context.leases.release(self)

    @property
    def stop(self) -> StopRequest | None:
        """Immediate stop in effect: no trainer may start any more, and a live one has a grace period."""
        requested = self.requested_stop
        return requested if requested is not None and requested.is_immediate else None

    @property
    def kill_at(self) -> float:
        """Time since boot at which the trainer must be dead unless a renewal succeeds before."""
        return self._sent + self._context.settings.kill_after_seconds

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last successful renewal was sent."""
        return since_boot() - self._sent

    @property
    def longest_silence(self) -> float:
        """Longest time without a successful renewal so far, in seconds."""
        return max(self._longest_silence, self.silent_seconds)

    @property
    def was_always_renewed(self) -> bool:
        """True if every renewal succeeded before a trainer had to end for lack of one."""
        return self.longest_silence < self._context.settings.kill_after_seconds

    @property
    def expired(self) -> bool:
        """True if the last successful renewal was too long ago."""
        return since_boot() >= self.kill_at

    def guard(self, processes: TrainingGroup) -> None:
        """Send the trainer its deadline, now and with every renewal."""
        self._processes = processes
        processes.send(ControlMessage(renew_until=self.kill_at))
        self.renew_now()  # fetches requests made while the run waited

    def renew_now(self) -> None:
        """Renew at once, since there may be new requests."""
        self._now.set()

    def _keep_renewed(self) -> None:
        settings = self._context.settings
        pause = settings.renew_seconds
        while not self.fenced:
            self._now.wait(pause)
            self._now.clear()
            if self._over:
                return
            # Retry sooner after a failure, so that a short outage of the database costs no run.
            pause = settings.renew_seconds if self._renew() else settings.renew_seconds / 4

    def _renew(self) -> bool:
        sent = since_boot()
        try:
            with self._context.lease_engine.begin() as connection:
                row = connection.execute(self._renewal_statement()).one_or_none()
        except SQLAlchemyError as error:
            log.info("%s: renewal failed, %.1f s left: %s", self.run_id, self.kill_at - sent, error)
            return False
        if row is None:
            self.fenced = True
            log.warning("%s: another worker owns the run, or it has ended", self.run_id)
            return True
        self._longest_silence = self.longest_silence
        self._sent = sent
        self._apply_row(row)
        if self._processes:
            self._processes.send(ControlMessage(renew_until=self.kill_at))
        return True

    def _renewal_statement(self) -> Executable:
        return machine.renew(self.run_id, self.lease_epoch, self._context.settings.lease_seconds)

    def _apply_row(self, row: Row[Any]) -> None:
        """Take over what a renewal has brought."""
        self.requested_stop = StopRequest(row.stop_mode, "stop", row.stop_grace_seconds) if row.stop_mode else None
        self.preempted_for = self.preempted_for or row.preempted_for
        self.actions = [ActionRequest(**one) for one in row.actions or []]
        ended = []
        for part in row.parts or []:
            end = None if part["outcome"] is None else PartEnd.model_validate(part["outcome"])
            is_released = end is not None and end.is_released
            if part["is_leaving"] or is_released:
                self.leaving = part["worker_id"]
            if part["ended"] and not is_released:
                ended.append(EndedPart(part["worker_id"], part["first_rank"], part["devices"], end))
        self.ended_parts = ended
        self.active_parts = [
            ActivePart(**{**one, "activity": PartActivity.model_validate(one["activity"])})
            for one in row.activities or []
        ]


class PartLease(Lease):
    """Lease on a part of a run whose lead is another worker; it has expired until the first renewal."""

    def __init__(self, context: WorkerContext, run_id: str, lease_epoch: int, part: int) -> None:
        super().__init__(context, run_id, lease_epoch, since_boot() - context.settings.kill_after_seconds)
        self.meeting: str | None = None
        """Place at which the ranks meet; None until the lead has prepared the attempt."""
        self.activity: Callable[[], PartActivity] | None = None
        """Returns what the processes of the part do."""
        self._part = part
        self.renew_now()

    def _renewal_statement(self) -> Executable:
        activity = None if self.activity is None else self.activity().model_dump(mode="json")
        seconds = self._context.settings.lease_seconds
        return parts.renew(self.run_id, self.lease_epoch, self._part, seconds, activity)

    def _apply_row(self, row: Row[Any]) -> None:
        self.meeting = row.meeting


class LeaseLost(Exception):
    """Postgres was not reached in time: the run may have another owner by now, and no trainer of it may live."""
