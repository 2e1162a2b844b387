"""Life of a run on a worker: claim → prepare → launch → monitor → conclude."""

import logging
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

from sqlalchemy import Executable
from sqlalchemy.exc import SQLAlchemyError

from app.db import is_away
from app.events.log import Fenced
from app.lean_structlog import bound_contextvars
from app.runs import lifecycle
from worker import last_words, repairs, sweeping
from worker.devices import Device
from worker.fetching import Patience
from worker.following import Following, KilledFor
from worker.host import Host
from worker.job import Job, JobError, prepare
from worker.launcher import LaunchAbandoned, LaunchError
from worker.lease import Lease
from worker.process import Exit, TrainingProcess
from worker.pump import Pump
from worker.remote import Stopped
from worker.repairs import Repair
from worker.vitals import Vitals
from worker.writer import LeaseLost, Writer

log = logging.getLogger(__name__)

ENTRIES = {"celery": "worker.training.__main__:main", "fake": "worker.fake:main"}
_RETRY_SECONDS = 2.0
_SHUTDOWN_NOTICE_SECONDS = 1.0
_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Ending = Callable[[], Executable]
"""Transition that ends an attempt, created when it is stored."""


def work(host: Host) -> None:
    """Train pending runs that fit, the most urgent first, until none is left."""
    while not host.closing.is_set():
        if host.fitness.trouble():
            return
        sent = time.monotonic()
        run = claim(host)
        if run is None:
            return
        supervise(host, run, sent)


@cache
def _claim(worker_id: str, backends: tuple[str, ...], lease_seconds: float, kind: str, memory_mb: int) -> Executable:
    # It is the same for every claim of a worker, and building it takes longer than executing it.
    return lifecycle.claim(worker_id, list(backends), lease_seconds, kind, memory_mb)


def claim(host: Host) -> Any:
    """Claim a run and its devices; None if there is none or the database is unavailable."""
    memory = max(device.memory_bytes // 2**20 for device in host.machine.devices)
    statement = _claim(host.id, tuple(host.backends), host.settings.lease_seconds, host.kind, memory)
    try:
        with host.engine.begin() as connection:
            run = connection.execute(statement).one_or_none()
    except SQLAlchemyError as error:
        if not is_away(error):
            raise
        log.warning("no run is claimed, the database is unavailable: %s", error)
        return None
    if run is not None:
        log.info("%s: attempt %d starts", run.id, run.attempt, extra={"run_id": run.id, "attempt": run.attempt})
        host.wake(run.id)
    return run


def supervise(host: Host, run: Any, claimed_at: float) -> None:
    """Run a claimed run to its end, or release it; in every case no process of it is left."""
    with (
        bound_contextvars(run_id=run.id, attempt=run.attempt),
        Lease(host, run.id, run.epoch, claimed_at) as lease,
        Writer(host, run, lease) as writer,
        host.copies.telling(run.id, writer.put) if host.copies else nullcontext(),
    ):
        try:
            ending = see_through(host, run, lease, writer)
            finish(host, writer, ending)
        except Fenced:
            log.warning("%s: fenced, its trainer has ended, nothing more is written", run.id)
        except LeaseLost:
            log.warning("%s: no answer from the database; the run will be reaped and continue", run.id)
    host.wake(run.id)


def see_through(host: Host, run: Any, lease: Lease, writer: Writer) -> Ending:
    """Run one attempt and store everything it reported; return the transition that ends it.

    The lease binds only the trainer. Once the trainer has ended, it is safe to wait for the database: either this
    worker still owns the run when the database answers (after an outage leases have a grace period), or the lease epoch
    shows that it does not.

    Raises:
        Fenced: This worker no longer owns the run.
        LeaseLost: The worker is to end and the database does not answer.
    """
    try:
        try:
            transition = attempt(host, run, lease, writer)
            ending: Ending = lambda: transition  # noqa: E731
        except LeaseLost:
            log.warning("%s: its lease ran out and its trainer has ended; waiting for the database", run.id)
            ending = partial(out_of_reach, run, lease)
        writer.outlive_lease()
        writer.drain()
        return ending
    except (Fenced, LeaseLost):
        raise
    except Exception as error:
        # A bug in the worker must neither look like a lost worker nor be repeated attempt after attempt.
        log.exception("%s: attempt %d", run.id, run.attempt)
        writer.outlive_lease()
        return partial(lifecycle.fail, run.id, run.epoch, "internal", f"{error!r}; see the worker's log")


def attempt(host: Host, run: Any, lease: Lease, writer: Writer) -> Executable:
    """Prepare, launch and monitor one training process; return the transition that ends the attempt.

    Raises:
        LeaseLost: The lease expired; there is no trainer, or it has ended.
        Fenced: This worker no longer owns the run; there is no trainer, or it has ended.
    """
    device = next(one for one in host.machine.devices if one.index == run.device_indexes[0])
    pump = Pump(host, run, writer)
    try:
        patience = Patience(lambda: is_unwanted(host, lease), writer.put)
        job = writer.persist(lambda: prepare(host, run, device.for_job(), patience))
        pump.start_from(job)
        process = launch(host, run, lease, job, device)
    except (Stopped, LaunchAbandoned):
        return given_up(host, run, lease)
    except JobError as error:
        if error.pause_seconds is not None:
            return lifecycle.hand_back(run.id, run.epoch, f"released: {error.message}", error.pause_seconds)
        if error.is_passing:
            return not_here(host, run, error.message)
        return lifecycle.fail(run.id, run.epoch, error.code, error.message)
    except LaunchError as error:
        return not_here(host, run, f"no training process could be started: {error}")
    except OSError as error:
        log.exception("%s: attempt %d", run.id, run.attempt)
        return not_here(host, run, f"the attempt could not be prepared: {error}")
    host.fitness.started()
    vitals = Vitals(process.identity, device)
    try:
        end, killed_for = Following(host, lease, writer, pump, process, vitals).until_the_end()
    finally:
        process.close()
    sweeping.after_attempt(host, run.id, run.attempt)
    repair = repair_of(job, device, pump, end, killed_for)
    if repair:
        writer.outlive_lease()
        writer.drain()  # its last checkpoint may not be stored yet
        repair = writer.persist(partial(plan, host, run, repair))
    if repair or went_wrong(pump, killed_for):
        report = last_words.report(pump, vitals, end, killed_for, repair)
        writer.put(last_words.kept(run, report, time.time()))
    if repair:
        return lifecycle.repair(run.id, run.epoch, repair.reason)
    transition = conclude(host, run, lease, pump, end, killed_for)
    settle(host, lease, writer)
    return transition


def settle(host: Host, lease: Lease, writer: Writer) -> None:
    """Wait for the replicas of the checkpoints that the attempt has saved, unless none of them is wanted.

    After a repair nothing waits: the device would be idle each time, and the run most probably continues on this
    worker.
    """
    if host.copies and (lease.stop is None or lease.stop.save or lease.stop.finish):
        writer.outlive_lease()
        writer.drain()  # every saved checkpoint is queued for replication now
        host.copies.settle(lease, writer, min(host.drained_at, time.monotonic()) + host.settings.save_grace_seconds)


def launch(host: Host, run: Any, lease: Lease, job: Job, device: Device) -> TrainingProcess:
    """Start the training process, with its deadline in force before it does anything.

    Raises:
        LaunchAbandoned: The run was to end or to be released meanwhile.
    """
    if is_unwanted(host, lease):
        raise LaunchAbandoned("no longer wanted")
    # All workers of the machine share a GPU as one device; a share of the CPU is the worker's own.
    owner = device.id if device.kind == "cuda" else f"{host.id}-{device.id}"
    device_lock = host.settings.home / "run" / "devices" / owner
    device_lock.parent.mkdir(parents=True, exist_ok=True)
    # A kernel lock also rules out two trainers of one run on one machine, not only the lease.
    run_lock = host.storage.run_dir(run.id) / "trainer.lock"
    process = host.launcher.launch(
        ENTRIES[run.backend],
        job.path,
        device.for_job(),
        [device_lock, run_lock],
        renew_until=lambda: lease.kill_at,
        should_end=lambda: is_unwanted(host, lease),
        secrets=job.secrets,
    )
    lease.guard(process)
    return process


def is_unwanted(host: Host, lease: Lease) -> bool:
    """Return True if no trainer may start any more: the run is to end, to be released, or has another owner."""
    return bool(lease.stop) or lease.fenced or host.draining.is_set()


def went_wrong(pump: Pump, killed_for: KilledFor | None) -> bool:
    """Return True if the end of the attempt needs a failure report."""
    outcome = (pump.result or {}).get("outcome")
    return outcome == "failed" or (outcome is None and killed_for not in ("stop", "drain"))


def repair_of(job: Job, device: Device, pump: Pump, end: Exit, killed_for: KilledFor | None) -> Repair | None:
    """Return a repair with which another attempt continues the run; None if none is known or wanted."""
    result, config = pump.result or {}, pump.effective or job.config
    if result.get("outcome") == "failed":
        code = (result.get("error") or {}).get("code", "internal")
        return repairs.repair_for(config, pump.phase, code, result.get("repair"))
    # On a GPU it was the machine's memory that ran out, and a smaller batch does not need less of it.
    if not result and end.out_of_memory and not killed_for and device.kind == "cpu":
        return repairs.repair_for(config, pump.phase, repairs.OUT_OF_MEMORY, None)
    return None


def plan(host: Host, run: Any, repair: Repair) -> Repair:
    """Return the repair, completed with the checkpoint that it goes back to."""
    with host.engine.connect() as connection:
        return repairs.planned(connection, run, repair)


def conclude(host: Host, run: Any, lease: Lease, pump: Pump, end: Exit, killed_for: KilledFor | None) -> Executable:
    """Return the transition that follows from the trainer's result and the exit of its process.

    Raises:
        LeaseLost: The lease expired first.
    """
    result = pump.result or {}
    outcome = result.get("outcome")
    if outcome == "completed":
        reason = result.get("why") or "training is complete"
        pushed = result.get("hub")
        if isinstance(pushed, dict) and pushed.get("url"):
            reason += f"; pushed to {str(pushed['url'])[:300]}"
        return lifecycle.complete(run.id, run.epoch, output(run, result), reason)
    if outcome == "stopped" and result.get("why") == "time_limit":
        step = result.get("step")
        message = f"the time limit of the configuration was reached at step {step}; resume the run to continue"
        return lifecycle.fail(run.id, run.epoch, "time_limit", message, output(run, result))
    if outcome == "stopped" and result.get("why") == "stop_at_step":
        return lifecycle.complete(run.id, run.epoch, output(run, result), "stop_at_step was reached")
    if outcome == "stopped" and result.get("why") == "epoch_end":
        return lifecycle.cancel(run.id, run.epoch)
    if outcome == "failed":
        error = result.get("error") or {}
        return lifecycle.fail(run.id, run.epoch, error.get("code", "internal"), error.get("message", ""))
    if killed_for == "lease" or (end.signal == signal.SIGALRM and not outcome):
        raise LeaseLost(run.id)  # noticed by this worker, or by the trainer's own timer
    if killed_for == "hang":
        return hung(host, run, pump)
    if outcome == "stopped" or killed_for or end.signal in _TERMINATION_SIGNALS:
        return given_up(host, run, lease)
    return crashed(run, pump, end)


def given_up(host: Host, run: Any, lease: Lease) -> Executable:
    """Return the transition of a run whose trainer ended on request."""
    # A service manager signals worker and trainer at once: the trainer may be gone before the worker handles the
    # signal.
    if not lease.stop and not host.draining.wait(_SHUTDOWN_NOTICE_SECONDS):
        reason = "the training process was asked to end from outside"
        return lifecycle.retry(run.id, run.epoch, reason, _RETRY_SECONDS)
    if lease.stop:
        return lifecycle.cancel(run.id, run.epoch)
    return lifecycle.hand_back(run.id, run.epoch, "released: the worker is shutting down")


def not_here(host: Host, run: Any, why: str) -> Executable:
    """Return the transition of a run that could not be started, where the run or this worker may be the cause.

    So it is tried again a limited number of times, for a while preferably by another worker.
    """
    host.fitness.failed(why)
    return lifecycle.retry(run.id, run.epoch, why, _RETRY_SECONDS)


def out_of_reach(run: Any, lease: Lease) -> Executable:
    """Return the transition of a run whose lease expired; it counts as a loss, which any newer checkpoint clears."""
    if lease.stop:
        return lifecycle.cancel(run.id, run.epoch)
    if lease.was_always_renewed:
        what = "the training process received no renewal of its lease in time, though one was sent: the machine is "
        what += "overloaded, or the process was suspended"
    else:
        what = (
            f"the database was unreachable for {lease.longest_silence:.0f} s, or the worker was suspended for as long"
        )
    return lifecycle.retry(run.id, run.epoch, f"{what}; the run continues from its last checkpoint", _RETRY_SECONDS)


def hung(host: Host, run: Any, pump: Pump) -> Executable:
    """Return the transition of a run whose trainer was killed because it was silent for too long."""
    silence = f"it had neither reported nor printed anything for {host.settings.hang_seconds:.0f} s"
    reason = f"the training process hung during {pump.phase} and was killed: {silence}"
    return lifecycle.retry(run.id, run.epoch, reason, _RETRY_SECONDS)


def output(run: Any, result: dict[str, Any]) -> int | None:
    """Return the attempt whose folder holds the fine-tuned model, if the trainer exported one."""
    return run.attempt if result.get("output") else None


def crashed(run: Any, pump: Pump, end: Exit) -> Executable:
    """Return the transition of a run whose trainer ended without a result, by its exit and with its last lines."""
    if end.launcher_lost:
        reason = "the process that training processes are forked from was lost"
        return lifecycle.retry(run.id, run.epoch, reason, _RETRY_SECONDS)
    last = "\n".join(pump.tail) or "(it printed nothing)"
    if end.out_of_memory:
        code, what = "out_of_memory", "the kernel killed the training process because the machine ran out of memory"
    else:
        code = "trainer_crashed"
        how = f"signal {end.signal}" if end.signal else f"exit code {end.code}"
        what = f"the training process ended with {how} during {pump.phase} without reporting why"
    return lifecycle.fail(run.id, run.epoch, code, f"{what}. Its last lines:\n{last}")


def finish(host: Host, writer: Writer, ending: Ending) -> None:
    """Store the end of the attempt, which is its last write."""

    def write() -> None:
        with host.engine.begin() as connection:
            row = connection.execute(ending()).one_or_none()
        if row is not None:
            log.info("%s: %s", row.id, row.status)
        else:  # or an earlier try was committed, and only its response was lost
            log.warning("nothing written at the end: fenced, another worker owns the run")

    writer.persist(write)
