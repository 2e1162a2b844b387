"""The life of a run on a worker: claim → prepare → launch → pump → conclude."""

import errno
import logging
import signal
import time
from typing import Any

from sqlalchemy import Executable
from sqlalchemy.exc import SQLAlchemyError

from app.events.log import Fenced
from app.runs import lifecycle
from worker.devices import Device
from worker.host import Host
from worker.job import Job, JobError, prepare
from worker.launcher import LaunchError
from worker.lease import Lease
from worker.process import Exit, TrainingProcess
from worker.pump import LeaseLost, Pump

log = logging.getLogger(__name__)

ENTRIES = {"celery": "worker.training.__main__:main", "fake": "worker.fake:main"}
_RETRY_SECONDS = 2.0
_NO_SAVE_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.05


def work(host: Host) -> None:
    """Train what waits and fits, the most urgent first, until there is nothing left."""
    while not host.draining.is_set():
        sent = time.monotonic()
        run = claim(host)
        if run is None:
            return
        supervise(host, run, sent)


def claim(host: Host) -> Any:
    """Take a run and devices for it, or None."""
    memory = max(device.memory_bytes // 2**20 for device in host.machine.devices)
    statement = lifecycle.claim(host.id, host.backends, host.settings.lease_seconds, host.kind, memory)
    try:
        with host.engine.begin() as connection:
            run = connection.execute(statement).one_or_none()
    except SQLAlchemyError as error:
        log.warning("nothing claimed, the database is away: %s", error)
        return None
    if run is not None:
        log.info("%s: attempt %d begins", run.id, run.attempt)
        host.wake(run.id)
    return run


def supervise(host: Host, run: Any, claimed_at: float) -> None:
    """See a claimed run through to its end, or give it back; whatever happens, no process of it is left."""
    with Lease(host, run.id, run.epoch, claimed_at) as lease:
        pump = Pump(host, run, lease)
        try:
            ending = attempt(host, run, lease, pump)
            pump.flush_all()
            finish(host, pump, ending)
        except Fenced:
            log.warning("%s: fenced, its trainer is gone, nothing more is written", run.id)
        except LeaseLost:
            log.warning("%s: the database stayed away; the run will be taken back and go on", run.id)
    host.wake(run.id)


def attempt(host: Host, run: Any, lease: Lease, pump: Pump) -> Executable:
    """One try: prepare, launch, follow; answers the transition to end it with."""
    device = next(one for one in host.machine.devices if one.index == run.device_indexes[0])
    try:
        job = pump.persist(lambda: prepare(host, run, device.for_job()))
        pump.start_from(job.start_step, job.best_loss)
        for remark in job.remarks:
            pump.say(remark, "warning")
        if lease.stop:
            return lifecycle.cancel(run.id, run.epoch)
        process = launch(host, run, lease, job, device)
        try:
            end, killed_for = follow(host, lease, pump, process)
        finally:
            process.close()
        return conclude(host, run, lease, pump, end, killed_for)
    except JobError as error:
        return lifecycle.fail(run.id, run.epoch, error.code, error.message)
    except LaunchError as error:
        reason = f"no training process could be started: {error}"
        return lifecycle.retry(run.id, run.epoch, reason, _RETRY_SECONDS)
    except OSError as error:
        log.exception("%s: attempt %d", run.id, run.attempt)
        code = "disk_full" if error.errno == errno.ENOSPC else "internal"
        return lifecycle.fail(run.id, run.epoch, code, f"{error}; see the worker's log")


def launch(host: Host, run: Any, lease: Lease, job: Job, device: Device) -> TrainingProcess:
    """Start the training process, with its deadline in force from the first moment."""
    # A GPU is one device for every worker of the machine; a share of the CPU is the worker's own.
    owner = device.id if device.kind == "cuda" else f"{host.id}-{device.id}"
    lock = host.settings.home / "run" / "devices" / owner
    lock.parent.mkdir(parents=True, exist_ok=True)
    process = host.launcher.launch(ENTRIES[run.backend], job.path, device.for_job(), [lock], renew_until=lease.kill_at)
    lease.guard(process)
    return process


class Following:
    """What the supervisor has asked the trainer for, and since when."""

    def __init__(self) -> None:
        self.asked_at: float | None = None
        self.grace = 0.0
        self.killed_for: str | None = None


def follow(host: Host, lease: Lease, pump: Pump, process: TrainingProcess) -> tuple[Exit, str | None]:
    """Pump until the process has ended and all it said is taken; answers its end and why we killed it, if we did.

    Raises:
        Fenced, LeaseLost: the run is not ours any more; the process has been killed.
    """
    state = Following()
    while (ended := process.poll()) is None:
        if pump.is_full:
            time.sleep(_LOOK_SECONDS)  # unread output makes the trainer wait, memory stays bounded
        else:
            process.wait(_LOOK_SECONDS)
            pump.take(process.channel.receive(0.0))
        if lease.fenced or lease.expired:
            process.kill()
            raise Fenced(lease.run_id) if lease.fenced else LeaseLost(lease.run_id)
        obey(host, lease, pump, process, state)
        pump.flush_when_due()
    process.kill()  # what it left behind in its session
    pump.take(process.channel.drain())
    pump.end_of_output()
    return ended, state.killed_for


def obey(host: Host, lease: Lease, pump: Pump, process: TrainingProcess, state: Following) -> None:
    """Pass on a request to stop (or the worker's own shutdown) and see that it is followed within the grace."""
    stop = lease.stop
    if stop is None and not host.draining.is_set():
        return
    why = "stop" if stop else "drain"
    save = stop.save if stop else True
    now = time.monotonic()
    if state.asked_at is None:
        state.asked_at = now
        process.send({"stop": {"save": save, "why": why}})
    state.grace = host.settings.save_grace_seconds if save else _NO_SAVE_GRACE_SECONDS
    nothing_to_save = not pump.has_begun
    if nothing_to_save or now - state.asked_at > state.grace:
        if not nothing_to_save:
            pump.say(f"the training process did not stop within {state.grace:.0f} s and was killed", "warning")
        state.killed_for = why
        process.kill()


def conclude(host: Host, run: Any, lease: Lease, pump: Pump, end: Exit, killed_for: str | None) -> Executable:
    """The transition that follows from what the trainer said last and how it ended."""
    result = pump.result or {}
    outcome = result.get("outcome")
    if outcome == "completed":
        reason = result.get("why") or "training is complete"
        return lifecycle.complete(run.id, run.epoch, output(run, result), reason)
    if outcome == "stopped" and result.get("why") == "time_limit":
        step = result.get("step")
        message = f"the time limit of the configuration was reached at step {step}; resume the run to go on"
        return lifecycle.fail(run.id, run.epoch, "time_limit", message, output(run, result))
    if outcome == "stopped" and result.get("why") == "stop_at_step":
        return lifecycle.complete(run.id, run.epoch, output(run, result), "stop_at_step was reached")
    if outcome == "failed":
        error = result.get("error") or {}
        return lifecycle.fail(run.id, run.epoch, error.get("code", "internal"), error.get("message", ""))
    if lease.stop and (outcome == "stopped" or killed_for):
        return lifecycle.cancel(run.id, run.epoch)
    if host.draining.is_set() and (outcome == "stopped" or killed_for):
        return lifecycle.hand_back(run.id, run.epoch, "handed back: the worker is shutting down")
    if outcome == "stopped":
        return lifecycle.retry(run.id, run.epoch, "the training process was told to end from outside", _RETRY_SECONDS)
    return crashed(run, pump, end)


def output(run: Any, result: dict[str, Any]) -> int | None:
    """The attempt whose folder holds the fine-tuned model, if the trainer exported one."""
    return run.attempt if result.get("output") else None


def crashed(run: Any, pump: Pump, end: Exit) -> Executable:
    """No last word: classified by how the process ended, with its last lines."""
    if end.launcher_lost:
        reason = "the process that training processes are forked from was lost"
        return lifecycle.retry(run.id, run.epoch, reason, _RETRY_SECONDS)
    if end.signal == signal.SIGALRM:
        reason = "the training process ended itself because its lease was not renewed in time"
        return lifecycle.retry(run.id, run.epoch, reason, _RETRY_SECONDS)
    last = "\n".join(pump.tail) or "(it printed nothing)"
    if end.out_of_memory:
        code, what = "out_of_memory", "the kernel killed the training process because the machine ran out of memory"
    else:
        code = "trainer_crashed"
        how = f"signal {end.signal}" if end.signal else f"exit code {end.code}"
        what = f"the training process ended with {how} during {pump.phase} without saying why"
    return lifecycle.fail(run.id, run.epoch, code, f"{what}. Its last lines:\n{last}")


def finish(host: Host, pump: Pump, ending: Executable) -> None:
    """Store the end of the attempt; it is the last thing written of it."""

    def write() -> None:
        with host.engine.begin() as connection:
            row = connection.execute(ending).one_or_none()
        if row is not None:
            log.info("%s: %s", row.id, row.status)

    pump.persist(write)
