"""Supervisor of the runs of a slot: claims a run, holds its lease while it is trained, and claims the next one."""

import logging
from contextlib import nullcontext
from typing import Any

from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from app.infra.clock import since_boot
from app.infra.db import is_away, is_conflict
from app.infra.logs.lean_structlog import bound_contextvars
from app.runs.events.log import LeaseFenced
from app.runs.queue.claim import claim_run
from app.runs.state import machine
from worker.attempts.attempt import Attempt
from worker.attempts.device_checks import pause_unusable_devices, wait_for_devices
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.event_writer import EventWriter
from worker.lease import Lease, LeaseLost

log = logging.getLogger(__name__)

_CONFLICT_TRIES = 3
_NO_THREAD = "can't start new thread"
"""Text of Python's error where the kernel refuses a thread."""


def train_pending_runs(context: WorkerContext) -> None:
    """Train pending runs that fit, the most urgent first, until none is left; first wait until GPUs are checked."""
    wait_for_devices(context)
    while not context.closing.is_set() and not context.health.unhealthy_reason():
        sent = since_boot()
        run = claim(context)
        if run is None:
            break
        supervise_run(context, run, sent)


def claim(context: WorkerContext) -> ClaimedRun | None:
    """Claim a run and its devices; None if there is none or the database is unavailable."""
    pause_unusable_devices(context)
    row = _claim_row(context)
    if row is None:
        return None
    run = ClaimedRun.from_row(row)
    log.info("%s: attempt %d starts", run.id, run.attempt, extra={"run_id": run.id, "attempt": run.attempt})
    context.publisher.wake_streams(run.id)
    for worker_id in run.members:
        context.publisher.signal_control(worker_id)
    return run


def _claim_row(context: WorkerContext) -> Row[Any] | None:
    """Return the row of a claimed run once its claim is committed.

    If the answer to the commit is lost, the claim may stand: its lease then runs out, and another attempt trains the
    run. To train it here would be wrong, since the claim may also be lost.
    """
    for _ in range(_CONFLICT_TRIES):
        try:
            with context.engine.begin() as connection:
                row = claim_run(connection, context.id, context.settings.lease_seconds, context.only_run)
            return row
        except SQLAlchemyError as error:
            if not is_away(error):
                raise
            if not is_conflict(error):
                log.warning("no run is claimed, the database is unavailable: %s", error)
                return None
            # This transaction and another one waited for each other, which PostgreSQL ends after a second.
            conflict = error
    log.info("no run is claimed now, other claims take too long: %s", conflict)
    return None


def supervise_run(context: WorkerContext, run: ClaimedRun, claimed_at: float) -> None:
    """Run a claimed run to its end, or release it; in every case no process of it is left."""
    try:
        with (
            bound_contextvars(run_id=run.id, attempt=run.attempt),
            context.tracing.span("attempt", {"anneal.run_id": run.id, "anneal.attempt": run.attempt}),
            Lease(context, run.id, run.lease_epoch, claimed_at) as lease,
            EventWriter(context, run, lease) as writer,
            context.uploader.log_to(run.id, writer.enqueue_item) if context.uploader else nullcontext(),
            context.working_copy.used_by(run.id) if context.working_copy else nullcontext(),
        ):
            try:
                Attempt(context, run, lease, writer).run_to_end()
            except LeaseFenced:
                log.warning("%s: fenced, its trainer has ended, nothing more is written", run.id)
            except LeaseLost:
                log.warning("%s: no answer from the database; the run will be reaped and continue", run.id)
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        release_unstarted(context, run, "the user of this worker may have no more threads (`ulimit -u`)")
    context.publisher.wake_streams(run.id)
    if run.members:
        context.publisher.signal_control(run.id)


def release_unstarted(context: WorkerContext, run: ClaimedRun, problem: str) -> None:
    """Release a run whose attempt this worker cannot begin, and pause the worker."""
    log.error("%s: released: %s", run.id, problem)
    context.health.record_failed_start(problem)
    try:
        with context.engine.begin() as connection:
            connection.execute(machine.release(run.id, run.lease_epoch, f"released: {problem}"))
    except SQLAlchemyError as error:
        if not is_away(error):
            raise
        log.warning("%s: not released, the database is unavailable: the run is reaped and continues", run.id)
