"""Life of a run on a worker: claim → prepare → launch → monitor → conclude."""

import logging
import os
import pwd
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

from sqlalchemy import Executable
from sqlalchemy.exc import SQLAlchemyError

from app.contracts.attempt.failure_report import KillReason
from app.contracts.attempt.repair import Repair
from app.infra.db import is_away
from app.infra.lean_structlog import bound_contextvars
from app.runs.events.log import LeaseFenced
from app.runs.state import machine
from app.workers import registry
from worker import devices
from worker.attempts import auto_repair, failure_report
from worker.attempts.job_builder import Job, JobError, prepare
from worker.attempts.memory_watch import MemoryWatch
from worker.attempts.monitor import Monitor
from worker.attempts.outcome import (
    DEVICE_ERROR,
    conclude,
    could_not_start,
    ended_here_before,
    ended_on_request,
    is_signal_death,
    lease_lost,
    needs_failure_report,
)
from worker.checkpoint_store import cleanup
from worker.checkpoint_store.remote_store import TransferCancelled
from worker.checkpoint_store.restore import RestoreControl
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.devices import Device
from worker.health import UNUSABLE_PAUSE_SECONDS
from worker.ingest.event_writer import EventWriter
from worker.ingest.record_handler import RecordHandler, StartPoint
from worker.lease import Lease, LeaseLost
from worker.process.spawn import LaunchAbandoned, LaunchError
from worker.process.training_group import TrainingGroup
from worker.process.training_process import Exit, TrainingProcess
from worker.telemetry import DeviceFeed
from worker.wire.rank_place import RankPlace

log = logging.getLogger(__name__)


_LOOK_SECONDS = 1.0
_LOCK_QUOTAS = machine.lock_quotas()

_TRAINING = "worker.training.__main__:main"
ENTRIES = {"celery": _TRAINING, "fake": "worker.fake.trainer:main", "ray": _TRAINING}


Ending = Callable[[], Executable]
"""Transition that ends an attempt, created when it is stored."""


def wait_for_devices(context: WorkerContext) -> None:
    """Wait until GPUs are checked, or the worker is to end."""
    while context.kind == "cuda" and not context.closing.is_set():
        if context.launcher.wait_checked(_LOOK_SECONDS):
            break


def work(context: WorkerContext) -> None:
    """Train pending runs that fit, the most urgent first, until none is left; first wait until GPUs are checked."""
    wait_for_devices(context)
    while not context.closing.is_set():
        if context.health.trouble():
            return
        sent = time.monotonic()
        run = claim(context)
        if run is None:
            return
        supervise(context, run, sent)


@cache
def _claim(
    worker_id: str,
    backends: tuple[str, ...],
    lease_seconds: float,
    kind: str,
    labels: tuple[str, ...],
    only_run: str | None,
) -> Executable:
    # It is the same for every claim of a worker, and building it takes longer than executing it.
    return machine.claim(worker_id, list(backends), lease_seconds, kind, list(labels), only_run)


def claim(context: WorkerContext) -> ClaimedRun | None:
    """Claim a run and its devices; None if there is none or the database is unavailable."""
    settings = context.settings
    _pause_unusable_devices(context)
    statement = _claim(
        context.id, tuple(context.backends), settings.lease_seconds, context.kind, settings.labels, context.only_run
    )
    try:
        with context.engine.begin() as connection:
            connection.execute(_LOCK_QUOTAS)
            row = connection.execute(statement).one_or_none()
    except SQLAlchemyError as error:
        if not is_away(error):
            raise
        log.warning("no run is claimed, the database is unavailable: %s", error)
        return None
    if row is None:
        return None
    run = ClaimedRun.of(row)
    log.info("%s: attempt %d starts", run.id, run.attempt, extra={"run_id": run.id, "attempt": run.attempt})
    context.wake(run.id)
    return run


def _pause_unusable_devices(context: WorkerContext) -> None:
    """Pause the idle GPUs on which a run would fail; resume those that are usable again.

    While the database is unavailable nothing changes, and nothing is claimed either.
    """
    found = {device.index: _trouble(context, device) for device in context.machine.devices}
    unusable = context.health.unusable
    if not unusable and not any(found.values()):
        return
    try:
        with context.engine.begin() as connection:
            for index, why in found.items():
                if why is None and index in unusable:
                    connection.execute(registry.resume_device(context.id, index))
                    unusable.remove(index)
                elif why is not None:
                    statement = registry.pause_idle_device(context.id, index, why, UNUSABLE_PAUSE_SECONDS)
                    if connection.scalar(statement) is not None and index not in unusable:
                        log.warning("device %d takes no run: %s", index, why)
                        unusable.add(index)
    except SQLAlchemyError as error:
        if not is_away(error):
            raise


def _trouble(context: WorkerContext, device: Device) -> str | None:
    """Return a sentence about what would fail a run on an idle device; None if nothing is known."""
    broken = context.launcher.broken.get(device.id)
    if broken is not None:
        return (
            f"a training step failed on it when the worker started ({broken}): check it with `nvidia-smi`, and the "
            "kernel's log for Xid errors, then restart the worker"
        )
    return devices.occupation(device)


def supervise(context: WorkerContext, run: ClaimedRun, claimed_at: float) -> None:
    """Run a claimed run to its end, or release it; in every case no process of it is left."""
    with (
        bound_contextvars(run_id=run.id, attempt=run.attempt),
        context.tracing.span("attempt", {"anneal.run_id": run.id, "anneal.attempt": run.attempt}),
        Lease(context, run.id, run.lease_epoch, claimed_at) as lease,
        EventWriter(context, run, lease) as writer,
        context.replicator.log_to(run.id, writer.put) if context.replicator else nullcontext(),
    ):
        try:
            ending = run_attempt_to_outcome(context, run, lease, writer)
            finish(context, writer, ending)
        except LeaseFenced:
            log.warning("%s: fenced, its trainer has ended, nothing more is written", run.id)
        except LeaseLost:
            log.warning("%s: no answer from the database; the run will be reaped and continue", run.id)
    context.wake(run.id)


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
            transition = attempt(context, run, lease, writer)
            ending: Ending = lambda: transition  # noqa: E731
        except LeaseLost:
            log.warning("%s: its lease ran out and its trainer has ended; waiting for the database", run.id)
            ending = partial(lease_lost, run, lease)
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


def attempt(context: WorkerContext, run: ClaimedRun, lease: Lease, writer: EventWriter) -> Executable:
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
        restore_control = RestoreControl(lambda: is_unwanted(context, lease), writer.put)
        job = writer.persist(lambda: prepare(context, run, device.for_job(), restore_control))
        start = StartPoint(job.start_step, job.start_epoch, job.best_loss, job.best_score)
        record_handler.start_from(start, job.secrets.values(), job.remarks)
        processes = launch(context, run, lease, job, assigned)
    except (TransferCancelled, LaunchAbandoned):
        return ended_on_request(context, run, lease)
    except JobError as error:
        if error.pause_seconds is not None:
            return machine.release(run.id, run.lease_epoch, f"released: {error.message}", error.pause_seconds)
        if error.is_transient:
            return could_not_start(context, run, error.message)
        return machine.fail(run.id, run.lease_epoch, error.code, error.message)
    except LaunchError as error:
        return could_not_start(context, run, f"a training process could not be started: {error}")
    except OSError as error:
        log.exception("%s: attempt %d", run.id, run.attempt)
        return could_not_start(context, run, f"the attempt could not be prepared: {error}")
    context.health.started()
    memory_watch = MemoryWatch(processes.identities, assigned)
    feeds = [DeviceFeed(context.telemetry, one, writer.put) for one in assigned]
    try:
        monitor = Monitor(context, lease, writer, record_handler, processes, memory_watch, feeds)
        end, killed_for = monitor.run_until_exit()
    finally:
        processes.close()
    cleanup.after_attempt(context, run.id, run.attempt)
    judge_devices(context, writer, assigned, record_handler)
    repair = repair_of(job, device, record_handler, end, killed_for)
    if repair:
        writer.wait_past_lease()
        writer.drain()  # its last checkpoint may not be stored yet
        repair = writer.persist(partial(plan, context, run, repair))
    if repair or needs_failure_report(record_handler, killed_for):
        report = failure_report.build_failure_report(record_handler, memory_watch, end, killed_for, repair)
        writer.put(failure_report.store_failure_report(run, report, time.time()))
    if repair:
        return machine.repair(run.id, run.lease_epoch, repair.reason)
    is_repeated = False
    if is_signal_death(record_handler, end, killed_for):
        writer.wait_past_lease()
        is_repeated = writer.persist(partial(recurs, context, run, record_handler.step))
    transition = conclude(context, run, lease, record_handler, end, killed_for, is_repeated)
    settle(context, lease, writer)
    return transition


def judge_devices(
    context: WorkerContext, writer: EventWriter, assigned: Sequence[Device], record_handler: RecordHandler
) -> None:
    """Pause the device whose failure was reported; let all take runs again if the trainer ended well."""
    result = record_handler.result
    if result is None:
        return
    error = result.get("error")
    statements: list[Executable] = []
    if result["outcome"] != "failed":
        worked = [one for one in assigned if context.health.device_worked(one.index)]
        statements = [registry.resume_device(context.id, one.index) for one in worked]
    elif error and error["code"] == DEVICE_ERROR:
        device = assigned[record_handler.failed_rank]
        pause = context.health.device_failed(device.index)
        log.error("device %d takes no run for %.0f s: %s", device.index, pause, error["message"])
        statements = [registry.pause_device(context.id, device.index, error["message"], pause)]
    if not statements:
        return

    def write() -> None:
        with context.engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)

    writer.wait_past_lease()
    writer.persist(write)


def settle(context: WorkerContext, lease: Lease, writer: EventWriter) -> None:
    """Wait for the replicas of the checkpoints that the attempt has saved, unless none of them is wanted.

    After a repair nothing waits: the device would be idle each time, and the run most probably continues on this
    worker.
    """
    if context.replicator and (lease.stop is None or lease.stop.mode != "discard"):
        writer.wait_past_lease()
        writer.drain()  # every saved checkpoint is queued for replication now
        until = min(context.drained_at, time.monotonic()) + context.settings.save_grace_seconds
        context.replicator.settle(lease.run_id, lambda: lease.fenced or lease.expired, writer.put, until)


def launch(
    context: WorkerContext, run: ClaimedRun, lease: Lease, job: Job, assigned: Sequence[Device]
) -> TrainingGroup:
    """Start a training process for each device, with its deadline in force before it does anything.

    Raises:
        LaunchAbandoned: The run was to end or to be released meanwhile.
        LaunchError: A process could not be started; none is left.
    """
    if is_unwanted(context, lease):
        raise LaunchAbandoned("no longer wanted")
    # A kernel lock also rules out two trainers of one run on one machine, not only the lease.
    run_lock = context.storage.run_dir(run.id) / "trainer.lock"
    folder = _rank_folder(context.settings.trainer_user) if len(assigned) > 1 else None
    started: list[TrainingProcess] = []
    try:
        for rank, device in enumerate(assigned):
            process = context.launcher.launch(
                ENTRIES[run.backend],
                job.path,
                [one.for_job() for one in assigned],
                [_device_lock(context, device), *([run_lock] if rank == 0 else [])],
                place=RankPlace(rank, len(assigned), folder) if folder else None,
                renew_until=lambda: lease.kill_at,
                should_end=lambda: is_unwanted(context, lease),
                secrets=job.secrets,
            )
            started.append(process)
    except BaseException:
        TrainingGroup(started, folder).close()
        raise
    processes = TrainingGroup(started, folder)
    lease.guard(processes)
    return processes


def _device_lock(context: WorkerContext, device: Device) -> Path:
    """Return the lock of a device: workers of a machine share a GPU, and a share of the CPU is the worker's own."""
    owner = device.id if device.kind == "cuda" else f"{context.id}-{device.id}"
    path = context.settings.home / "run" / "devices" / owner
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _rank_folder(user: str | None) -> Path:
    """Create a folder on this host that only the training processes can read."""
    folder = Path(tempfile.mkdtemp(prefix="anneal-ranks-"))
    if user:
        account = pwd.getpwnam(user)
        os.chown(folder, account.pw_uid, account.pw_gid)
    return folder


def is_unwanted(context: WorkerContext, lease: Lease) -> bool:
    """Return True if no trainer may start any more: the run is to end, to be released, or has another owner."""
    return bool(lease.stop or lease.preempted_for) or lease.fenced or context.draining.is_set()


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


def plan(context: WorkerContext, run: ClaimedRun, repair: Repair) -> Repair:
    """Return the repair, completed with the checkpoint that it goes back to."""
    with context.engine.connect() as connection:
        return auto_repair.resolve_repair(connection, run, repair)


def recurs(context: WorkerContext, run: ClaimedRun, step: int | None) -> bool:
    """Return True if a signal also ended an earlier attempt at this step."""
    with context.engine.connect() as connection:
        return ended_here_before(connection, run, step)


def finish(context: WorkerContext, writer: EventWriter, ending: Ending) -> None:
    """Store the end of the attempt, which is its last write."""

    def write() -> None:
        with context.engine.begin() as connection:
            row = connection.execute(ending()).one_or_none()
        if row is not None:
            log.info("%s: %s", row.id, row.status)
        else:  # or an earlier try was committed, and only its response was lost
            log.warning("nothing written at the end: fenced, another worker owns the run")

    writer.persist(write)
