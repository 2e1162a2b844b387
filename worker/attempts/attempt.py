"""Attempt of a run on this worker: prepare → launch → monitor → judge devices → repair or conclude → deliver."""

import errno
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Executable

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.attempt.repair import Repair
from anneal.contracts.run_task import RunTask
from app.infra.ids import is_id
from app.runs.events.log import LeaseFenced
from app.runs.state import machine, parts
from worker.attempts import auto_repair, failure_report
from worker.attempts.checkpoint_source import CheckpointSource
from worker.attempts.delivery import Delivery
from worker.attempts.job_builder import Job, prepare_job
from worker.attempts.job_error import STORAGE_UNAVAILABLE, JobError
from worker.attempts.job_inputs import JobInputs
from worker.attempts.launch import Group, Meeting, launch_processes
from worker.attempts.memory_watch import MemoryWatch
from worker.attempts.monitor import Monitor
from worker.attempts.outcome import (
    conclude_attempt,
    device_verdicts,
    ended_here_before,
    failed_start_transition,
    has_failed,
    is_signal_death,
    lease_loss_transition,
    requested_end_transition,
    surviving_process_transition,
)
from worker.checkpoint_store import cleanup
from worker.checkpoint_store.remote_store import RemoteStore, TransferCancelled
from worker.checkpoint_store.restore import RestoreControl
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.devices import Device
from worker.group_network import MeetingPort
from worker.ingest.event_writer import EventWriter
from worker.ingest.record_handler import RecordHandler
from worker.lease import Lease, LeaseLost
from worker.presence.question_relay import AdapterUnavailable, QuestionRelay
from worker.process.process_group import StillAliveError
from worker.process.spawn import LaunchAbandoned, LaunchError
from worker.process.training_group import TrainingGroup
from worker.process.training_process import Exit
from worker.telemetry import DeviceFeed

log = logging.getLogger(__name__)

_TRAINING = "worker.training.__main__:main"
ENTRIES = {"celery": _TRAINING, "fake": "worker.fake.trainer:main", "ray": _TRAINING}

Ending = Callable[[], Executable]
"""Transition that ends an attempt, created when it is stored."""
T = TypeVar("T")


class Attempt:
    """Attempt of a claimed run; its methods are the steps of `train`, in order, taken by its supervisor alone.

    A step that cannot be done raises an error; `ending_after` alone decides what follows.
    """

    def __init__(self, context: WorkerContext, run: ClaimedRun, lease: Lease, writer: EventWriter) -> None:
        self._context, self._run, self._lease, self._writer = context, run, lease, writer
        self._relay = self._question_relay() if run.task == RunTask.serve else None
        on_answers = None if self._relay is None else self._relay.publish
        self._record_handler = RecordHandler(context, run, writer, on_answers=on_answers)
        self._has_started = False
        """True once its training processes are started."""

    @cached_property
    def _devices(self) -> list[Device]:
        return self._context.machine.select_devices(sorted(self._run.device_indexes))

    def run_to_end(self) -> None:
        """Run the attempt, store everything that it has reported, and then its end.

        The lease binds only the trainer. Once the trainer has ended, it is safe to wait for the database: either this
        worker still owns the run when the database answers (after an outage leases have a grace period), or the lease
        epoch shows that it does not.

        Raises:
            LeaseFenced: This worker no longer owns the run.
            LeaseLost: The worker is to end and the database does not answer.
        """
        try:
            transition = self.train()
            ending: Ending = lambda: transition  # noqa: E731
        except Exception as error:
            ending = self.ending_after(error)
        try:
            self._writer.wait_past_lease()
            self._writer.drain()
        except (LeaseFenced, LeaseLost):
            raise
        except Exception as error:  # what the attempt has reported cannot be stored
            ending = self.ending_after(error)
        self.store_end(ending)

    def train(self) -> Executable:
        """Take the steps of the attempt; return the transition that ends it."""
        job = self.prepare()
        processes = self.launch(job)
        try:
            memory_watch = MemoryWatch(processes.identities, self._devices)
            with nullcontext() if self._relay is None else self._relay.running(processes.send):
                end = self.monitor(processes, memory_watch)
        finally:
            self.close_processes(processes)
        # None is left, so the lease binds nothing any more.
        self._writer.wait_past_lease()
        cleanup.after_attempt(self._context, self._run.id, self._run.attempt)
        self.judge_devices()
        repair = None
        if has_failed(self._record_handler.state, end):
            repair = self.find_repair(job, end)
            self.report_failure(memory_watch, end, repair)
        if repair is not None:
            transition = machine.repair(self._run.id, self._run.lease_epoch, repair.reason)
        else:
            transition = self.conclude(end)
        if self._context.working_copy is not None:
            remote = self._context.working_copy.remote
            transition = self.deliver(remote, transition, is_repaired=repair is not None)
        return transition

    def prepare(self) -> Job:
        """Write the job of the training processes, with everything that it names on this worker."""
        restore_control = RestoreControl(self.is_unwanted, self._writer.enqueue_item)
        device = self._devices[0].for_job()
        job = self._writer.retry_during_outage(lambda: prepare_job(self._context, self._run, device, restore_control))
        self._record_handler.start_from(job.start, job.secrets.values(), job.remarks)
        return job

    def _question_relay(self) -> QuestionRelay:
        run = self._run
        return QuestionRelay(self._context.redis, run.id, run.attempt, self._find_adapter, self.is_unwanted)

    def _find_adapter(self, model: str) -> Path | None:
        """Return the folder of the adapter that is the output of a run, or a checkpoint; None if the attempt ends."""
        relay = self._relay
        has_ended = lambda: self.is_unwanted() or (relay is not None and relay.has_ended)  # noqa: E731
        control = RestoreControl(has_ended, self._writer.enqueue_item)
        try:
            if is_id(model, "ckpt"):
                source = CheckpointSource(self._context, self._run, control)
                return source.folder_of(source.obtain_chosen(model))
            return JobInputs(self._context, self._run, control).fetch_adapter(model)
        except TransferCancelled:
            return None
        except JobError as error:
            raise AdapterUnavailable(error.message) from error
        except Exception as error:  # the next question may be to another one
            log.warning("%s: adapter %s cannot be had", self._run.id, model, exc_info=error)
            message = (
                f"The worker cannot read the adapter {model}: ask again; if it fails again, its log has the cause."
            )
            raise AdapterUnavailable(message) from error

    def launch(self, job: Job) -> TrainingGroup:
        """Start the training processes of this host, and let the workers of the other hosts start theirs.

        Raises:
            LaunchAbandoned: The run was to end or to be released meanwhile.
            LaunchError: A process could not be started; none is left here.
            OSError: The ranks cannot meet at the address of this worker.
        """
        context, run = self._context, self._run
        # A kernel lock also rules out two trainers of one run on one machine, not only the lease.
        group = Group(ENTRIES[run.backend], job.path, job.secrets, context.storage.run_dir(run.id) / "trainer.lock")
        if run.members and context.group_address is not None:
            processes = self._launch_at_meeting(group, MeetingPort(context.group_address))
        else:
            processes = launch_processes(context, self._lease, group, self._devices, self.is_unwanted)
        self._has_started = True
        context.health.record_start()
        return processes

    def _launch_at_meeting(self, group: Group, meeting_port: MeetingPort) -> TrainingGroup:
        context, run = self._context, self._run
        try:
            meeting = Meeting(meeting_port.meeting, first_rank=0, size=run.devices_needed)
            job = None if context.working_copy is None else JobSpec.from_file(group.job_path).model_dump(mode="json")
            announcement = parts.announce(run.id, run.lease_epoch, meeting.place, job)
            self._transact(lambda connection: connection.execute(announcement))
            context.publisher.signal_control(run.id)
            processes = launch_processes(context, self._lease, group, self._devices, self.is_unwanted, meeting)
        except BaseException:
            meeting_port.close()
            raise
        processes.at_end(meeting_port.close)
        return processes

    def is_unwanted(self) -> bool:
        """Return True if no trainer may start any more: the run is to end, to be released, or has another owner."""
        is_asked = bool(self._lease.stop or self._lease.preempted_for or self._lease.leaving)
        return is_asked or self._lease.fenced or self._context.draining.is_set()

    def monitor(self, processes: TrainingGroup, memory_watch: MemoryWatch) -> Exit:
        """Follow the training processes to their end."""
        feeds = [DeviceFeed(self._context.telemetry, device, self._writer.enqueue_item) for device in self._devices]
        return Monitor(
            self._context, self._lease, self._writer, self._record_handler, processes, memory_watch, feeds,
            self._run.members,
        ).run_until_exit()  # fmt: skip

    def close_processes(self, processes: TrainingGroup) -> None:
        """Kill what is left of the training processes.

        Raises:
            StillAliveError: One does not end; its device takes no run until it has.
        """
        try:
            processes.close()
        except StillAliveError:
            self._context.health.record_survivors(self._run.device_indexes, processes.identities)
            raise

    def judge_devices(self) -> None:
        """Pause the device whose failure was reported; let all take runs again if the trainer ended well."""
        state = self._record_handler.state
        if state.result is not None and (
            statements := device_verdicts(self._context, self._devices, state.result, state.failed_rank)
        ):
            self._transact(lambda connection: [connection.execute(statement) for statement in statements])

    def find_repair(self, job: Job, end: Exit) -> Repair | None:
        """Return a repair with which another attempt continues the run; None if none is known or wanted."""
        state = self._record_handler.state
        result, config, repair = state.result, state.effective or job.config, None
        if result is not None and result["outcome"] == "failed":
            error = result.get("error")
            code = error["code"] if error else "internal"
            repair = auto_repair.propose_repair(config, state.phase, code, result.get("repair"))
        # On a GPU it was the machine's memory that ran out, and a smaller batch does not need less of it.
        elif not result and end.out_of_memory and not end.killed_for and self._devices[0].kind == "cpu":
            repair = auto_repair.propose_repair(config, state.phase, auto_repair.OUT_OF_MEMORY, None)
        if repair is not None:
            self._writer.drain()  # its last checkpoint may not be stored yet
            repair = self._transact(partial(auto_repair.resolve_repair, run=self._run, repair=repair))
        return repair

    def report_failure(self, memory_watch: MemoryWatch, end: Exit, repair: Repair | None) -> None:
        """Store the failure report, and the repair with it."""
        rank = end.rank if self._run.devices_needed > 1 else None
        state = self._record_handler.state
        report = failure_report.build_failure_report(state, memory_watch, end, repair, rank)
        self._writer.enqueue_item(failure_report.store_failure_report(self._run, report, time.time()))

    def conclude(self, end: Exit) -> Executable:
        """Return the transition that follows from the trainer's result and the end of its processes."""
        state = self._record_handler.state
        is_repeated = is_signal_death(state, end) and self._transact(
            partial(ended_here_before, run=self._run, step=state.step)
        )
        return conclude_attempt(self._context, self._run, self._lease, state, end, is_repeated)

    def deliver(self, remote: RemoteStore, transition: Executable, *, is_repaired: bool) -> Executable:
        """Send what the attempt has written to the object store; return what ends the attempt then.

        After a repair nothing waits for uploads: the device would be idle each time, and the run most probably
        continues on this worker.
        """
        result = self._record_handler.state.result
        has_output = not is_repaired and result is not None and bool(result.get("output"))
        delivery = Delivery(self._context, remote, self._run, self._lease, self._writer)
        if self._context.uploader is not None and not is_repaired:
            delivery.wait_for_uploads(self._context.uploader)
        return delivery.deliver(transition, has_output=has_output)

    def ending_after(self, error: Exception) -> Ending:
        """Return what ends the attempt after an error of a step.

        Raises:
            LeaseFenced: This is the error: nothing more may be written.
        """
        context, run = self._context, self._run
        match error:
            case LeaseFenced():
                raise error
            case LeaseLost():
                log.warning("%s: its lease ran out and its trainer has ended; waiting for the database", run.id)
                return partial(lease_loss_transition, run, self._lease)
            case TransferCancelled() | LaunchAbandoned():
                transition = requested_end_transition(context, run, self._lease)
            case JobError(pause_seconds=float(pause)):
                context.health.record_failed_start(error.message)
                transition = machine.release(run.id, run.lease_epoch, f"released: {error.message}", pause)
            case JobError(is_transient=True):
                # Anything else that is missing here may be the fault of this worker, not of the run.
                code = error.code if error.code == STORAGE_UNAVAILABLE else "worker_lost"
                transition = failed_start_transition(context.health, run, error.message, code)
            case JobError():
                transition = machine.fail(run.id, run.lease_epoch, error.code, error.message)
            case LaunchError():
                reason = f"a training process could not be started: {error}"
                transition = failed_start_transition(context.health, run, reason)
            case StillAliveError():
                log.error("%s: attempt %d: %s", run.id, run.attempt, error)
                transition = surviving_process_transition(run, error)
            case OSError() if not self._has_started:
                log.error("%s: attempt %d", run.id, run.attempt, exc_info=error)
                code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "worker_lost"
                reason = f"the attempt could not be prepared: {error}"
                transition = failed_start_transition(context.health, run, reason, code)
            case _:
                # A bug in the worker must neither look like a lost worker nor be repeated attempt after attempt.
                log.error("%s: attempt %d", run.id, run.attempt, exc_info=error)
                # Not its text, which may be that of the database, with the values of a statement.
                kind = type(error).__name__
                what = f"an internal error of the worker ({kind}); an operator finds the cause in its log"
                transition = machine.fail(run.id, run.lease_epoch, "internal", what)
        return lambda: transition

    def store_end(self, ending: Ending) -> None:
        """Store the end of the attempt, which is its last write."""
        row = self._transact(lambda connection: connection.execute(ending()).one_or_none())
        if row is not None:
            log.info("%s: %s", row.id, row.status)
        else:  # or an earlier try was committed, and only its response was lost
            log.warning("nothing written at the end: fenced, another worker owns the run")

    def _transact(self, work: Callable[[Connection], T]) -> T:
        """Do `work` in a transaction, again while the database is unavailable."""

        def do_work() -> T:
            with self._context.engine.begin() as connection:
                return work(connection)

        return self._writer.retry_during_outage(do_work)
