"""Outcomes of an attempt and the transitions that end it."""

import signal

from sqlalchemy import Executable

from app.contracts.attempt.failure_report import KillReason
from app.contracts.attempt.messages import TrainingResult
from app.runs.state import machine
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.record_handler import RecordHandler
from worker.lease import Lease, LeaseLost
from worker.process.training_process import Exit

DEVICE_ERROR = "device_error"
"""Code of a failure whose cause is the device, so that another device may train the run."""

_RETRY_SECONDS = 2.0

_SHUTDOWN_NOTICE_SECONDS = 1.0

_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def needs_failure_report(record_handler: RecordHandler, killed_for: KillReason | None) -> bool:
    """Return True if the end of the attempt needs a failure report."""
    outcome = record_handler.result["outcome"] if record_handler.result else None
    return outcome == "failed" or (outcome is None and killed_for not in ("stop", "drain"))


def conclude(
    context: WorkerContext,
    run: ClaimedRun,
    lease: Lease,
    record_handler: RecordHandler,
    end: Exit,
    killed_for: KillReason | None,
) -> Executable:
    """Return the transition that follows from the trainer's result and the exit of its process.

    Raises:
        LeaseLost: The lease expired first.
    """
    result = record_handler.result
    if result is not None and (reported := _reported_end(run, result)) is not None:
        return reported
    if killed_for == "lease" or (end.signal == signal.SIGALRM and result is None):
        raise LeaseLost(run.id)  # noticed by this worker, or by the trainer's own timer
    if killed_for == "hang":
        return hung(context, run, record_handler)
    if result is not None or killed_for or end.signal in _TERMINATION_SIGNALS:
        return ended_on_request(context, run, lease)
    return crashed(run, record_handler, end)


def _reported_end(run: ClaimedRun, result: TrainingResult) -> Executable | None:
    """Return the transition that the trainer's result determines; None if the run was stopped on request."""
    why = result.get("why")
    match result["outcome"]:
        case "completed":
            reason = why or "training is complete"
            hub = result.get("hub")
            if hub and hub.get("url"):
                reason += f"; pushed to {hub['url'][:300]}"
            return machine.complete(run.id, run.lease_epoch, output(run, result), reason)
        case "failed":
            error = result.get("error") or {"code": "internal", "message": ""}
            if error["code"] == DEVICE_ERROR:
                return machine.retry(run.id, run.lease_epoch, error["message"], _RETRY_SECONDS, DEVICE_ERROR)
            return machine.fail(run.id, run.lease_epoch, error["code"], error["message"])
    match why:
        case "time_limit":
            step = result.get("step")
            message = f"the time limit of the configuration was reached at step {step}; resume the run to continue"
            return machine.fail(run.id, run.lease_epoch, "time_limit", message, output(run, result))
        case "stop_at_step":
            return machine.complete(run.id, run.lease_epoch, output(run, result), "stop_at_step was reached")
        case "epoch_end":
            return machine.cancel(run.id, run.lease_epoch)
    return None


def ended_on_request(context: WorkerContext, run: ClaimedRun, lease: Lease) -> Executable:
    """Return the transition of a run whose trainer ended on request."""
    # A service manager signals worker and trainer at once: the trainer may be gone before the worker handles the
    # signal.
    if not lease.stop and not context.draining.wait(_SHUTDOWN_NOTICE_SECONDS):
        reason = "the training process was asked to end from outside"
        return machine.retry(run.id, run.lease_epoch, reason, _RETRY_SECONDS)
    if lease.stop:
        return machine.cancel(run.id, run.lease_epoch)
    return machine.release(run.id, run.lease_epoch, "released: the worker is shutting down")


def could_not_start(context: WorkerContext, run: ClaimedRun, why: str) -> Executable:
    """Return the transition of a run that could not be started, where the run or this worker may be the cause.

    So it is tried again a limited number of times, for a while preferably by another worker.
    """
    context.health.failed(why)
    return machine.retry(run.id, run.lease_epoch, why, _RETRY_SECONDS)


def lease_lost(run: ClaimedRun, lease: Lease) -> Executable:
    """Return the transition of a run whose lease expired; it counts as a loss, which any newer checkpoint clears."""
    if lease.stop:
        return machine.cancel(run.id, run.lease_epoch)
    if lease.was_always_renewed:
        what = "the training process received no renewal of its lease in time, though one was sent: the machine is "
        what += "overloaded, or the process was suspended"
    else:
        what = (
            f"the database was unreachable for {lease.longest_silence:.0f} s, or the worker was suspended for as long"
        )
    return machine.retry(run.id, run.lease_epoch, f"{what}; the run continues from its last checkpoint", _RETRY_SECONDS)


def hung(context: WorkerContext, run: ClaimedRun, record_handler: RecordHandler) -> Executable:
    """Return the transition of a run whose trainer was killed because it was silent for too long."""
    silence = f"it had neither reported nor printed anything for {context.settings.hang_seconds:.0f} s"
    reason = f"the training process hung during {record_handler.phase} and was killed: {silence}"
    return machine.retry(run.id, run.lease_epoch, reason, _RETRY_SECONDS)


def output(run: ClaimedRun, result: TrainingResult) -> int | None:
    """Return the attempt whose folder holds the fine-tuned model, if the trainer exported one."""
    return run.attempt if result.get("output") else None


def crashed(run: ClaimedRun, record_handler: RecordHandler, end: Exit) -> Executable:
    """Return the transition of a run whose trainer ended without a result, by its exit and with its last lines."""
    if end.launcher_lost:
        reason = "the process that training processes are forked from was lost"
        return machine.retry(run.id, run.lease_epoch, reason, _RETRY_SECONDS)
    last = "\n".join(record_handler.tail) or "(it printed nothing)"
    if end.out_of_memory:
        code, what = "out_of_memory", "the kernel killed the training process because the machine ran out of memory"
    else:
        code = "trainer_crashed"
        how = f"signal {end.signal}" if end.signal else f"exit code {end.code}"
        what = f"the training process ended with {how} during {record_handler.phase} without reporting why"
    return machine.fail(run.id, run.lease_epoch, code, f"{what}. Its last lines:\n{last}")
