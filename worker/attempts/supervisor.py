"""Life of a run on a worker: claim → prepare → launch → monitor → conclude."""

import errno
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from sqlalchemy import Executable, Row
from sqlalchemy.exc import SQLAlchemyError

from anneal.contracts.attempt.failure_report import KillReason
from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.attempt.repair import Repair
from app.infra.clock import since_boot
from app.infra.db import is_away, is_conflict
from app.infra.lean_structlog import bound_contextvars
from app.runs.events.log import LeaseFenced
from app.runs.queue.claim import claim_run
from app.runs.state import machine, parts
from worker.attempts import auto_repair, failure_report
from worker.attempts.delivery import deliver_output
from worker.attempts.device_checks import pause_unusable_devices, wait_for_devices
from worker.attempts.job_builder import Job, prepare_job
from worker.attempts.job_error import STORAGE_UNAVAILABLE, JobError
from worker.attempts.launch import Group, Meeting, launch_processes
from worker.attempts.memory_watch import MemoryWatch
from worker.attempts.monitor import Monitor
from worker.attempts.outcome import (
    conclude_attempt,
    device_verdicts,
    ended_here_before,
    failed_start_transition,
    is_signal_death,
    lease_loss_transition,
    needs_failure_report,
    requested_end_transition,
)
from worker.checkpoint_store import cleanup
from worker.checkpoint_store.remote_store import TransferCancelled
from worker.checkpoint_store.restore import RestoreControl
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.devices import Device
from worker.group_network import MeetingPort
from worker.ingest.event_writer import EventWriter
from worker.ingest.record_handler import RecordHandler, StartPoint
from worker.lease import Lease, LeaseLost
from worker.process.spawn import LaunchAbandoned, LaunchError
from worker.process.training_group import TrainingGroup
from worker.process.training_process import Exit
from worker.telemetry import DeviceFeed

log = logging.getLogger(__name__)


_TRAINING = "worker.training.__main__:main"
ENTRIES = {"celery": _TRAINING, "fake": "worker.fake.trainer:main", "ray": _TRAINING}

_CONFLICT_TRIES = 3
_NO_THREAD = "can't start new thread"
"""Text of Python's error where the kernel refuses a thread."""

Ending = Callable[[], Executable]
"""Transition that ends an attempt, created when it is stored."""


def train_pending_runs(context: WorkerContext) -> None:
    """Train pending runs that fit, the most urgent first, until none is left; first wait until GPUs are checked."""
    wait_for_devices(context)
    while not context.closing.is_set():
        if context.health.unhealthy_reason():
            return
        sent = since_boot()
        run = claim(context)
        if run is None:
            return
        supervise_run(context, run, sent)


def _repeated_in_conflict(work: Callable[[], Row[Any] | None]) -> Row[Any] | None:
    """Do a transaction, again if another one and it waited for each other, which PostgreSQL ends after a second."""
    for _ in range(_CONFLICT_TRIES - 1):
        try:
            return work()
        except SQLAlchemyError as error:
            if not is_conflict(error):
                raise
    return work()


def claim(context: WorkerContext) -> ClaimedRun | None:
    """Claim a run and its devices; None if there is none or the database is unavailable."""
    settings = context.settings
    pause_unusable_devices(context)

    def claim_row() -> Row[Any] | None:
        with context.engine.begin() as connection:
            return claim_run(connection, context.id, settings.lease_seconds, context.only_run)

    try:
        row = _repeated_in_conflict(claim_row)
    except SQLAlchemyError as error:
        if not is_away(error):
            raise
        if is_conflict(error):
            log.info("no run is claimed now, other claims take too long: %s", error)
        else:
            log.warning("no run is claimed, the database is unavailable: %s", error)
        return None
    if row is None:
        return None
    run = ClaimedRun.from_row(row)
    log.info("%s: attempt %d starts", run.id, run.attempt, extra={"run_id": run.id, "attempt": run.attempt})
    context.wake_streams(run.id)
    for worker_id in run.members:
        context.signal_control(worker_id)
    return run


def supervise_run(context: WorkerContext, run: ClaimedRun, claimed_at: float) -> None:
    """Run a claimed run to its end, or release it; in every case no process of it is left."""
    try:
        _supervise_with_lease(context, run, claimed_at)
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        release_unstarted(context, run, "the user of this worker may have no more threads (`ulimit -u`)")
    context.wake_streams(run.id)
    if run.members:
        context.signal_control(run.id)


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


def _supervise_with_lease(context: WorkerContext, run: ClaimedRun, claimed_at: float) -> None:
    with (
        bound_contextvars(run_id=run.id, attempt=run.attempt),
        context.tracing.span("attempt", {"anneal.run_id": run.id, "anneal.attempt": run.attempt}),
        Lease(context, run.id, run.lease_epoch, claimed_at) as lease,
        EventWriter(context, run, lease) as writer,
        context.uploader.log_to(run.id, writer.enqueue_item) if context.uploader else nullcontext(),
        context.working_copy.used_by(run.id) if context.working_copy else nullcontext(),
    ):
        try:
            ending = run_attempt_to_outcome(context, run, lease, writer)
            finish_attempt(context, writer, ending)
        except LeaseFenced:
            log.warning("%s: fenced, its trainer has ended, nothing more is written", run.id)
        except LeaseLost:
            log.warning("%s: no answer from the database; the run will be reaped and continue", run.id)


def run_attempt_to_outcome(context: WorkerContext, run: ClaimedRun, lease: Lease, writer: EventWriter) -> Ending:
    """Run one attempt and store everything it reported; return the transition that ends it.

    The lease binds only the trainer. Once the trainer has ended, it is safe to wait for the database: either this
    worker still owns the run when the database answers (after an outage leases have a grace period), or the lease epoch
    shows that it does not.

    Raises:
        LeaseFenced: This worker no longer owns the run.
        LeaseLost: The worker is to end and the database does not answer.
    """
    try:
        try:
            transition = run_attempt(context, run, lease, writer)
            ending: Ending = lambda: transition  # noqa: E731
        except LeaseLost:
            log.warning("%s: its lease ran out and its trainer has ended; waiting for the database", run.id)
            ending = partial(lease_loss_transition, run, lease)
        writer.wait_past_lease()
        writer.drain()
        return ending
    except (LeaseFenced, LeaseLost):
        raise
    except Exception as error:
        # A bug in the worker must neither look like a lost worker nor be repeated attempt after attempt.
        log.exception("%s: attempt %d", run.id, run.attempt)
        writer.wait_past_lease()
        # Not its text, which may be that of the database, with the values of a statement.
        what = f"an internal error of the worker ({type(error).__name__}); an operator finds the cause in its log"
        return partial(machine.fail, run.id, run.lease_epoch, "internal", what)


def run_attempt(context: WorkerContext, run: ClaimedRun, lease: Lease, writer: EventWriter) -> Executable:
    """Prepare, launch and monitor the training processes; return the transition that ends the attempt.

    Raises:
        LeaseLost: The lease expired; there is no trainer, or it has ended.
        LeaseFenced: This worker no longer owns the run; there is no trainer, or it has ended.
    """
    by_index = {device.index: device for device in context.machine.devices}
    assigned = [by_index[index] for index in sorted(run.device_indexes)]
    device = assigned[0]
    record_handler = RecordHandler(context, run, writer)
    try:
        restore_control = RestoreControl(lambda: is_unwanted(context, lease), writer.enqueue_item)
        job = writer.retry_during_outage(lambda: prepare_job(context, run, device.for_job(), restore_control))
        start = StartPoint(job.start_step, job.start_epoch, job.best_loss, job.best_score)
        record_handler.start_from(start, job.secrets.values(), job.remarks)
        processes = launch_all(context, run, lease, writer, job, assigned)
    except (TransferCancelled, LaunchAbandoned):
        return requested_end_transition(context, run, lease)
    except JobError as error:
        if error.pause_seconds is not None:
            context.health.record_failed_start(error.message)
            return machine.release(run.id, run.lease_epoch, f"released: {error.message}", error.pause_seconds)
        if error.is_transient:
            # Anything else that is missing here may be the fault of this worker, not of the run.
            code = error.code if error.code == STORAGE_UNAVAILABLE else "worker_lost"
            return failed_start_transition(context, run, error.message, code)
        return machine.fail(run.id, run.lease_epoch, error.code, error.message)
    except LaunchError as error:
        return failed_start_transition(context, run, f"a training process could not be started: {error}")
    except OSError as error:
        log.exception("%s: attempt %d", run.id, run.attempt)
        code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "worker_lost"
        return failed_start_transition(context, run, f"the attempt could not be prepared: {error}", code)
    context.health.record_start()
    memory_watch = MemoryWatch(processes.identities, assigned)
    feeds = [DeviceFeed(context.telemetry, one, writer.enqueue_item) for one in assigned]
    try:
        monitor = Monitor(context, lease, writer, record_handler, processes, memory_watch, feeds, run.members)
        end, killed_for = monitor.run_until_exit()
    finally:
        processes.close()
    cleanup.after_attempt(context, run.id, run.attempt)
    judge_devices(context, writer, assigned, record_handler)
    repair = repair_of(job, device, record_handler, end, killed_for)
    if repair:
        writer.wait_past_lease()
        writer.drain()  # its last checkpoint may not be stored yet
        repair = writer.retry_during_outage(partial(complete_repair, context, run, repair))
    if repair or needs_failure_report(record_handler, killed_for):
        rank = end.rank if run.devices_needed > 1 else None
        report = failure_report.build_failure_report(record_handler, memory_watch, end, killed_for, repair, rank)
        writer.enqueue_item(failure_report.store_failure_report(run, report, time.time()))
    if repair:
        ending = machine.repair(run.id, run.lease_epoch, repair.reason)
        return deliver_output(context, run, lease, writer, ending, has_output=False)
    is_repeated = False
    if is_signal_death(record_handler, end, killed_for):
        writer.wait_past_lease()
        is_repeated = writer.retry_during_outage(partial(is_repeated_crash, context, run, record_handler.step))
    transition = conclude_attempt(context, run, lease, record_handler, end, killed_for, is_repeated)
    wait_for_uploads(context, lease, writer)
    has_output = bool(record_handler.result and record_handler.result.get("output"))
    return deliver_output(context, run, lease, writer, transition, has_output=has_output)


def judge_devices(
    context: WorkerContext, writer: EventWriter, assigned: Sequence[Device], record_handler: RecordHandler
) -> None:
    """Pause the device whose failure was reported; let all take runs again if the trainer ended well."""
    if record_handler.result is None:
        return
    statements = device_verdicts(context, assigned, record_handler.result, record_handler.failed_rank)
    if not statements:
        return

    def store_verdicts() -> None:
        with context.engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)

    writer.wait_past_lease()
    writer.retry_during_outage(store_verdicts)


def wait_for_uploads(context: WorkerContext, lease: Lease, writer: EventWriter) -> None:
    """Wait until the checkpoints that the attempt has saved are in the object store, unless none of them is wanted.

    After a repair nothing waits: the device would be idle each time, and the run most probably continues on this
    worker.
    """
    if context.uploader and (lease.stop is None or lease.stop.mode != "discard"):
        writer.wait_past_lease()
        writer.drain()  # every saved checkpoint is queued for its upload now
        until = min(context.drained_at, time.monotonic()) + context.settings.save_grace_seconds
        context.uploader.wait_until_sent(
            lease.run_id, lambda: lease.fenced or lease.expired, writer.enqueue_item, until
        )


def launch_all(
    context: WorkerContext, run: ClaimedRun, lease: Lease, writer: EventWriter, job: Job, assigned: Sequence[Device]
) -> TrainingGroup:
    """Start the training processes of this host, and let the workers of the other hosts start theirs.

    Raises:
        LaunchAbandoned: The run was to end or to be released meanwhile.
        LaunchError: A process could not be started; none is left here.
        OSError: The ranks cannot meet at the address of this worker.
    """
    # A kernel lock also rules out two trainers of one run on one machine, not only the lease.
    group = Group(ENTRIES[run.backend], job.path, job.secrets, context.storage.run_dir(run.id) / "trainer.lock")
    unwanted = partial(is_unwanted, context, lease)
    if not run.members or context.group_address is None:
        return launch_processes(context, lease, group, assigned, unwanted)
    meeting_port = MeetingPort(context.group_address)
    try:
        meeting = Meeting(meeting_port.meeting, first_rank=0, size=run.devices_needed)
        own_job = None if context.working_copy is None else JobSpec.from_file(job.path).model_dump(mode="json")

        def announce_meeting() -> None:
            with context.engine.begin() as connection:
                connection.execute(parts.announce(run.id, run.lease_epoch, meeting.place, own_job))

        writer.retry_during_outage(announce_meeting)
        context.signal_control(run.id)
        processes = launch_processes(context, lease, group, assigned, unwanted, meeting)
    except BaseException:
        meeting_port.close()
        raise
    processes.at_end(meeting_port.close)
    return processes


def is_unwanted(context: WorkerContext, lease: Lease) -> bool:
    """Return True if no trainer may start any more: the run is to end, to be released, or has another owner."""
    is_asked = bool(lease.stop or lease.preempted_for or lease.leaving)
    return is_asked or lease.fenced or context.draining.is_set()


def repair_of(
    job: Job, device: Device, record_handler: RecordHandler, end: Exit, killed_for: KillReason | None
) -> Repair | None:
    """Return a repair with which another attempt continues the run; None if none is known or wanted."""
    result, config = record_handler.result, record_handler.effective or job.config
    if result is not None and result["outcome"] == "failed":
        error = result.get("error")
        code = error["code"] if error else "internal"
        return auto_repair.propose_repair(config, record_handler.phase, code, result.get("repair"))
    # On a GPU it was the machine's memory that ran out, and a smaller batch does not need less of it.
    if not result and end.out_of_memory and not killed_for and device.kind == "cpu":
        return auto_repair.propose_repair(config, record_handler.phase, auto_repair.OUT_OF_MEMORY, None)
    return None


def complete_repair(context: WorkerContext, run: ClaimedRun, repair: Repair) -> Repair:
    """Return the repair, completed with the checkpoint that it goes back to."""
    with context.engine.connect() as connection:
        return auto_repair.resolve_repair(connection, run, repair)


def is_repeated_crash(context: WorkerContext, run: ClaimedRun, step: int | None) -> bool:
    """Return True if a signal also ended an earlier attempt at this step."""
    with context.engine.connect() as connection:
        return ended_here_before(connection, run, step)


def finish_attempt(context: WorkerContext, writer: EventWriter, ending: Ending) -> None:
    """Store the end of the attempt, which is its last write."""

    def store_end() -> None:
        with context.engine.begin() as connection:
            row = connection.execute(ending()).one_or_none()
        if row is not None:
            log.info("%s: %s", row.id, row.status)
        else:  # or an earlier try was committed, and only its response was lost
            log.warning("nothing written at the end: fenced, another worker owns the run")

    writer.retry_during_outage(store_end)
