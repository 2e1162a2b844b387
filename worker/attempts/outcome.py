"""Outcomes of an attempt and the transitions that end it."""

import logging
import signal
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, Executable, Integer, cast, exists, select

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.run_status import EndReason
from anneal.contracts.run_task import RunTask
from app.runs.state import machine
from app.tables.runs import Attempt
from app.workers import registry
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.devices import Device
from worker.health import WorkerHealth
from worker.ingest.attempt_state import AttemptState
from worker.lease import EndedPart, Lease, LeaseLost
from worker.process.process_group import StillAliveError
from worker.process.training_process import Exit
from worker.wire.rank_place import EXIT_RANK_ZERO_UNREACHABLE

log = logging.getLogger(__name__)

DEVICE_ERROR = "device_error"
"""Code of a failure whose cause is the device, so that another device may train the run."""

_RETRY_SECONDS = 2.0

_SHUTDOWN_NOTICE_SECONDS = 1.0

_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_LIMITS: Mapping[str | None, tuple[EndReason, str]] = {
    None: ("finished", "training is complete"),
    "export": ("finished", "the checkpoint is exported"),
    "early_stopping": ("early_stopping", "early_stopping"),
    "callback": ("callback", "a callback (`extra.callbacks`) ended the training"),
    "time_limit": ("time_limit", "time_limit_seconds was reached; resume the run to continue"),
    "stop_at_step": ("stop_at_step", "stop_at_step was reached; resume the run to continue"),
}
"""End reason and text of the `status` event, by the trainer's reason."""

_COMPLETE = {
    RunTask.evaluate: "the evaluation is complete",
    RunTask.predict: "all rows are answered",
    RunTask.serve: "no question has come for a while",
}
"""Texts of runs that do not train."""

_OWN_STOPS = ("epoch_end", "time_limit", "stop_at_step")
"""Reasons for which a trainer stops without an immediate request."""


def has_failed(state: AttemptState, end: Exit) -> bool:
    """Return True if the trainer failed, or ended without a result and not on request."""
    outcome = state.result["outcome"] if state.result else None
    return outcome == "failed" or (outcome is None and end.killed_for not in ("stop", "drain"))


def conclude_attempt(
    context: WorkerContext,
    run: ClaimedRun,
    lease: Lease,
    state: AttemptState,
    end: Exit,
    is_repeated: bool = False,
) -> Executable:
    """Return the transition that follows from the trainer's result and the exit of its process.

    `is_repeated`: a signal also ended an earlier attempt at this step.

    Raises:
        LeaseLost: The lease expired first.
    """
    result = state.result
    if result is not None and _is_decisive(result):
        transition = _reported_transition(run, result)
    elif end.killed_for == "lease" or (end.signal == signal.SIGALRM and result is None):
        raise LeaseLost(run.id)  # noticed by this worker, or by the trainer's own timer
    elif end.killed_for == "hang":
        transition = hang_transition(run, state, end, context.settings.hang_seconds)
    elif result is not None or end.killed_for or end.signal in _TERMINATION_SIGNALS:
        transition = requested_end_transition(context, run, lease)
    else:
        transition = crash_transition(run, state, end, is_repeated)
    return transition


def _is_decisive(result: TrainingResult) -> bool:
    """Return False if the trainer ended on request, so that the request decides what follows."""
    return result["outcome"] in ("completed", "failed") or result.get("why") in _OWN_STOPS


def _reported_transition(run: ClaimedRun, result: TrainingResult) -> Executable:
    """Return the transition that the trainer's result determines."""
    if result["outcome"] == "failed":
        error = result.get("error") or {"code": "internal", "message": ""}
        if error["code"] == DEVICE_ERROR:
            return machine.retry(run.id, run.lease_epoch, error["message"], _RETRY_SECONDS, DEVICE_ERROR)
        return machine.fail(run.id, run.lease_epoch, error["code"], error["message"])
    why = result.get("why")
    if why == "epoch_end":
        return machine.cancel(run.id, run.lease_epoch)
    end_reason, text = _LIMITS.get(why, _LIMITS[None])
    text = _COMPLETE.get(run.task, text)
    if exported := result.get("exported"):
        text += f"; exported the {exported[:300]}"
    hub = result.get("hub")
    if hub and hub.get("url"):
        text += f"; pushed to {hub['url'][:300]}"
    return machine.complete(run.id, run.lease_epoch, output_attempt(run, result), text, end_reason)


def requested_end_transition(context: WorkerContext, run: ClaimedRun, lease: Lease) -> Executable:
    """Return the transition of a run whose trainer ended on request."""
    # A service manager signals worker and trainer at once: the trainer may be gone before the worker handles the
    # signal.
    is_requested = lease.stop or lease.preempted_for or lease.leaving
    if not is_requested and not context.draining.wait(_SHUTDOWN_NOTICE_SECONDS):
        reason = "the training process was asked to end from outside"
        return machine.retry(run.id, run.lease_epoch, reason, _RETRY_SECONDS)
    if lease.stop:
        return machine.cancel(run.id, run.lease_epoch)
    if lease.preempted_for:
        if run.task == RunTask.serve:  # it has nothing to continue, and the next question starts another one
            reason = f"made room for run {lease.preempted_for}, which waits"
            return machine.complete(run.id, run.lease_epoch, None, reason)
        return machine.release(
            run.id, run.lease_epoch, f"preempted for run {lease.preempted_for}, which has a higher priority"
        )
    if lease.leaving:
        reason = f"released: worker {lease.leaving}, which trains a part of the run, is shutting down"
        return machine.release(run.id, run.lease_epoch, reason)
    return machine.release(run.id, run.lease_epoch, "released: the worker is shutting down")


def exit_of(part: EndedPart) -> Exit | None:
    """Return the end of a part on another host as that of a process; None if it causes no end of the run."""
    ranks = f"rank {part.first_rank}"
    if part.devices > 1:
        ranks = f"ranks {part.first_rank} to {part.first_rank + part.devices - 1}"
    whose = f"worker {part.worker_id}, which trained {ranks} of the run"
    end = part.end
    if end is None:
        return Exit(part_problem=f"{whose}, was lost", rank=part.first_rank)
    if end.problem is not None:
        return Exit(part_problem=f"{whose}, ended its part: {end.problem}", rank=end.rank)
    if end.peer_lost or (end.exit_code == 0 and end.failure is None):
        return None
    return Exit(
        code=end.exit_code,
        signal=end.exit_signal,
        launcher_lost=end.launcher_lost,
        out_of_memory=end.out_of_memory,
        rank=end.rank,
    )


def failed_start_transition(health: WorkerHealth, run: ClaimedRun, why: str, code: str = "worker_lost") -> Executable:
    """Return the transition of a run that could not be started, where the run or this worker may be the cause.

    So it is tried again a limited number of times, for a while preferably by another worker. Then it fails with `code`.
    """
    health.record_failed_start(why)
    return machine.retry(run.id, run.lease_epoch, why, _RETRY_SECONDS, code)


def lease_loss_transition(run: ClaimedRun, lease: Lease) -> Executable:
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


def hang_transition(run: ClaimedRun, state: AttemptState, end: Exit, seconds: float) -> Executable:
    """Return the transition of a run whose trainer was killed because it was silent for too long."""
    silence = f"it had neither reported nor printed anything for {seconds:.0f} s"
    reason = f"the training process hung during {state.phase} and was killed: {silence}"
    if end.behind:
        reason += f"; the others waited for {', '.join(end.behind)}"
    if end.suspended:
        ranks = f"{'rank' if len(end.suspended) == 1 else 'ranks'} {', '.join(map(str, end.suspended))}"
        whose = f"the process of {ranks}" if run.devices_needed > 1 else "it"
        reason += f"; {whose} was suspended, by SIGSTOP or a debugger"
    return machine.retry(run.id, run.lease_epoch, reason, _RETRY_SECONDS)


def surviving_process_transition(run: ClaimedRun, error: StillAliveError) -> Executable:
    """Return the transition of a run of which a process does not end; it does nothing more, but may hold its device."""
    reason = (
        f"a training process does not end although it was killed ({error}); if it still exists, restart the machine"
    )
    return machine.retry(run.id, run.lease_epoch, reason, _RETRY_SECONDS)


def device_verdicts(
    context: WorkerContext, assigned: Sequence[Device], result: TrainingResult, failed: int
) -> list[Executable]:
    """Return what the result of an attempt says about its devices on this host.

    The one whose failure was reported is paused: that at the place `failed`, if it is one of these. All take runs again
    if the trainer ended well.
    """
    error = result.get("error")
    if result["outcome"] != "failed":
        working_devices = [one for one in assigned if context.health.device_worked(one.index)]
        return [registry.resume_device(context.id, one.index) for one in working_devices]
    if error and error["code"] == DEVICE_ERROR and 0 <= failed < len(assigned):
        device = assigned[failed]
        pause = context.health.device_failed(device.index)
        log.error("device %d takes no run for %.0f s: %s", device.index, pause, error["message"])
        return [registry.pause_device(context.id, device.index, error["message"], pause)]
    return []


def output_attempt(run: ClaimedRun, result: TrainingResult) -> int | None:
    """Return the attempt whose folder holds the fine-tuned model, if the trainer exported one."""
    return run.attempt if result.get("output") else None


def is_signal_death(state: AttemptState, end: Exit) -> bool:
    """Return True if a signal from outside the service, or a crash in native code, ended the trainer."""
    expected = (*_TERMINATION_SIGNALS, signal.SIGALRM)
    is_known = end.launcher_lost or end.out_of_memory or end.peer_lost
    unexplained = state.result is None and end.killed_for is None and not is_known
    return unexplained and end.signal is not None and end.signal not in expected


def ended_here_before(connection: Connection, run: ClaimedRun, step: int | None) -> bool:
    """Return True if a signal also ended an earlier attempt at this step."""
    earlier = exists().where(
        Attempt.run_id == run.id,
        Attempt.attempt < run.attempt,
        Attempt.outcome == "retried",
        Attempt.report["exit_signal"].astext.is_not(None),
        Attempt.report["killed_for"].astext.is_(None),
        cast(Attempt.report["step"].astext, Integer) == step,
    )
    return bool(connection.scalar(select(earlier)))


def crash_transition(run: ClaimedRun, state: AttemptState, end: Exit, is_repeated: bool) -> Executable:
    """Return the transition of a run whose trainer ended without a result.

    A run whose trainer was ended by a signal is tried again until that is repeated at one step.
    """
    if end.part_problem is not None:
        return machine.retry(run.id, run.lease_epoch, end.part_problem, _RETRY_SECONDS)
    if end.peer_lost:
        reason = "the training processes of the run lost the connection to each other"
        return machine.retry(run.id, run.lease_epoch, reason, _RETRY_SECONDS)
    if end.code == EXIT_RANK_ZERO_UNREACHABLE:
        reason = f"the training process of rank {end.rank} could not reach rank 0 on its own host, by the address of "
        reason += "ANNEAL_GROUP_INTERFACE: check that the interface still has the address that it had when the worker "
        reason += "started (if not, restart the worker), and that no firewall blocks it"
        return machine.retry(run.id, run.lease_epoch, reason, _RETRY_SECONDS)
    if end.launcher_lost:
        reason = "the process that training processes are forked from was lost"
        return machine.retry(run.id, run.lease_epoch, reason, _RETRY_SECONDS)
    see = f"`anneal runs why {run.id}` shows its last lines"
    if end.out_of_memory:
        what = "the kernel killed the training process because the machine ran out of memory"
        return machine.fail(run.id, run.lease_epoch, "out_of_memory", f"{what}; {see}")
    how = f"signal {end.signal}" if end.signal else f"exit code {end.code}"
    which = f"the training process of rank {end.rank}" if end.rank else "the training process"
    what = f"{which} ended with {how} during {state.phase} without reporting why"
    if end.signal and not is_repeated:
        return machine.retry(run.id, run.lease_epoch, what, _RETRY_SECONDS, code="trainer_crashed")
    if is_repeated:
        what += f", at step {state.step}, where an earlier attempt ended too"
    return machine.fail(run.id, run.lease_epoch, "trainer_crashed", f"{what}; {see}")
