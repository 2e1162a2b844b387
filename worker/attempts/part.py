"""Part of a run on this worker, whose lead is another one: wait for it → prepare → launch → watch → store the end.

The lead decides about the run; this worker stores for it only how the part has ended. The part ends with the lead's
attempt: its lease is then not renewed any more.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable, Row
from sqlalchemy.exc import SQLAlchemyError

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.attempt.part_activity import PartActivity
from anneal.contracts.attempt.part_end import PartEnd
from anneal.contracts.attempt.records import part_log
from app.infra.db import is_away
from app.infra.logs.lean_structlog import bound_contextvars
from app.runs.state import parts
from app.workers import registry
from worker.attempts import device_checks
from worker.attempts.job_builder import find_reward_hosts, read_secrets
from worker.attempts.job_error import JobError
from worker.attempts.launch import Group, Meeting, launch_processes
from worker.attempts.monitor import kill_and_drain, receive_output
from worker.attempts.outcome import device_verdicts
from worker.attempts.part_job import prepare_part
from worker.checkpoint_store import cleanup
from worker.checkpoint_store.remote_store import TransferCancelled
from worker.checkpoint_store.restore import RestoreControl
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.group_network import MeetingWatch
from worker.health import UNUSABLE_PAUSE_SECONDS
from worker.ingest.part_log import PartLog
from worker.ingest.record_handler import RecordHandler
from worker.lease import PartLease
from worker.process.process_group import StillAliveError
from worker.process.spawn import LaunchAbandoned, LaunchError
from worker.process.training_group import TrainingGroup
from worker.process.training_process import Exit
from worker.wire.rank_place import EXIT_RANK_ZERO_UNREACHABLE

log = logging.getLogger(__name__)

ENTRY = "worker.training.__main__:main"
_NOT_RENEWED = "its lease was not renewed in time, so it has no process any more"
_POLL_SECONDS = 0.05
_VISIBLE_SECONDS = 60.0
"""Time in which a file that the lead has written must be visible here."""
_RETRY_SECONDS = 0.5

T = TypeVar("T")


class PartSupervisors:
    """Threads that each train a part; the parts come with the worker's heartbeats."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._threads: dict[tuple[str, int], threading.Thread] = {}

    def start_new_parts(self, rows: Sequence[Row[Any]]) -> None:
        """Start to train the parts that are not known yet."""
        for row in rows:
            key = (row.run_id, row.lease_epoch)
            if key not in self._threads:
                thread = threading.Thread(target=train_part, args=(self._context, row), name=f"part {row.run_id}")
                thread.daemon = True
                self._threads[key] = thread
                thread.start()

    def wait(self) -> None:
        """Wait until all parts have ended."""
        while alive := [thread for thread in list(self._threads.values()) if thread.is_alive()]:
            alive[0].join()


def train_part(context: WorkerContext, row: Row[Any]) -> None:
    """Train a part until it ends; in every case no process of it is left, and its devices are free."""
    copy = context.working_copy
    with bound_contextvars(run_id=row.run_id), nullcontext() if copy is None else copy.used_by(row.run_id):
        try:
            with PartLease(context, row.run_id, row.lease_epoch, row.part) as lease:
                log.info("%s: trains a part from rank %d on", row.run_id, row.first_rank)
                part = Part(context, row, lease)
                part.run_to_end()
                log.info("%s: its part has ended", row.run_id)
        except StillAliveError:
            # The devices stay taken until the lease has expired, and those processes hold the locks.
            log.exception("%s: a process of the part does not end", row.run_id)
        else:
            part.clean_up_after_attempt()


class UnusableDevice(Exception):
    """A device of the part cannot be used: another program took it since the claim."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(problem)
        self.rank = rank


class Part:
    """Part of a run; its methods are the steps of `train`, in order.

    A step that cannot be done raises an error; `end_after` alone decides what the lead gets to know.
    """

    def __init__(self, context: WorkerContext, row: Row[Any], lease: PartLease) -> None:
        self._context = context
        self._row = row
        self._lease = lease
        self._devices = context.machine.select_devices(row.device_indexes)
        self._verdicts: list[Executable] = []
        """Statements about the devices, from how the part has ended."""
        self._is_leaving = False
        self._attempt: int | None = None
        """Number of the attempt, once processes of it were started here."""
        self._worked_at = time.monotonic()
        """Monotonic time of the last progress before there were processes."""
        self._restore_control = RestoreControl(self._should_end, lambda _: None)
        lease.activity = lambda: PartActivity(silent_seconds=time.monotonic() - self._worked_at)

    def run_to_end(self) -> None:
        """Train the part and store its end.

        Raises:
            StillAliveError: A process of it does not end.
        """
        try:
            end = self.train()
        except StillAliveError:
            raise
        except Exception as error:
            end = self.end_after(error)
        self.store_end(end)

    def train(self) -> PartEnd:
        """Wait until the lead has prepared the attempt, start the processes and watch them to their end."""
        meeting_place = self.wait_for_lead()
        self.check_devices()
        run, group, secrets = self.prepare()
        meeting = Meeting(meeting_place, self._row.first_rank, run.devices_needed)
        processes = launch_processes(self._context, self._lease, group, self._devices, self._is_unwanted, meeting)
        self._context.health.record_start()
        self._attempt = run.attempt
        with PartLog(self._context, run) as sink:
            handler = RecordHandler(self._context, run, sink, part_log(self._row.first_rank))
            handler.log.hide_secrets(secrets.values())
            self._lease.activity = lambda: _part_activity(processes, handler)
            try:
                with self._network_watch(meeting) as network:
                    return self._watch_processes(processes, handler, network)
            finally:
                self._close_processes(processes)

    def _close_processes(self, processes: TrainingGroup) -> None:
        try:
            processes.close()
        except StillAliveError:
            self._context.health.record_survivors(self._row.device_indexes, processes.identities)
            raise

    def wait_for_lead(self) -> str:
        """Wait until the lead has prepared the attempt; return the place at which the ranks meet."""
        while self._lease.meeting is None:
            if self._lease.fenced or self._context.draining.is_set():
                raise LaunchAbandoned("no longer wanted")
            time.sleep(_POLL_SECONDS)
        return self._lease.meeting

    def check_devices(self) -> None:
        """Pause a device that another program took since the claim, and raise `UnusableDevice`."""
        context = self._context
        for local_rank, device in enumerate(self._devices):
            if (why := device_checks.unusable_reason(context, device)) is not None:
                context.health.unusable.add(device.index)
                self._verdicts = [registry.pause_device(context.id, device.index, why, UNUSABLE_PAUSE_SECONDS)]
                rank = self._row.first_rank + local_rank
                raise UnusableDevice(rank, f"device {device.index} cannot be used: {why}")

    def prepare(self) -> tuple[ClaimedRun, Group, dict[str, str]]:
        """Prepare the part, again and again while the database is unavailable and the lease lasts."""
        while True:
            try:
                return self._prepare_job()
            except SQLAlchemyError as error:
                if not is_away(error):
                    raise
                log.info("%s: the start of its part waits for the database: %s", self._row.run_id, error)
            if self._is_unwanted():
                raise LaunchAbandoned("no longer wanted")
            time.sleep(_RETRY_SECONDS)

    def end_after(self, error: Exception) -> PartEnd:
        """Return the end of a part after an error of a step."""
        match error:
            case LaunchAbandoned() | TransferCancelled() if self._lease.fenced:
                end = self._part_end(exit_code=0)
            case LaunchAbandoned() | TransferCancelled() if self._context.draining.is_set():
                end = self._part_end(is_released=True)
            case LaunchAbandoned() | TransferCancelled():
                end = self._part_end(problem=_NOT_RENEWED)
            case UnusableDevice():
                end = self._part_end(rank=error.rank, problem=str(error))
            case JobError() | LaunchError() | OSError() | ValueError() if self._attempt is None:
                self._context.health.record_failed_start(str(error))
                end = self._part_end(problem=str(error))
            case _:
                log.error("%s: a part of the run", self._row.run_id, exc_info=error)
                # Not its text, which may be that of the database, with the values of a statement.
                kind = type(error).__name__
                problem = f"an internal error of the worker ({kind}); an operator finds the cause in its log"
                end = self._part_end(problem=problem)
        return end

    def store_end(self, end: PartEnd) -> None:
        """Store the end and free the devices, as soon as the database is available; then notify the lead."""
        row = self._row
        outcome = end.model_dump(mode="json")
        statements = [*parts.end(row.run_id, row.lease_epoch, row.part, self._context.id, outcome), *self._verdicts]
        while self._transact(lambda connection: [connection.execute(statement) for statement in statements]) is None:
            time.sleep(_RETRY_SECONDS)
        self._context.publisher.signal_control(row.run_id)

    def clean_up_after_attempt(self) -> None:
        """Remove what the processes have left half written, once the attempt is over: until then its lead may write."""
        row, context = self._row, self._context
        while self._attempt is not None and not context.closing.is_set():
            is_live = self._transact(lambda connection: connection.scalar(parts.is_live(row.run_id, row.lease_epoch)))
            if is_live is False:
                cleanup.after_attempt(context, row.run_id, self._attempt)
                return
            context.closing.wait(context.settings.renew_seconds)

    def _transact(self, work: Callable[[Connection], T]) -> T | None:
        """Do `work` in a transaction; return None if the database is unavailable."""
        try:
            with self._context.engine.begin() as connection:
                return work(connection)
        except SQLAlchemyError as error:
            if not is_away(error):
                raise
            log.info("%s: its part waits for the database: %s", self._row.run_id, error)
            return None

    def _should_end(self) -> bool:
        self._worked_at = time.monotonic()
        return self._is_unwanted()

    def _is_unwanted(self) -> bool:
        return self._lease.fenced or self._lease.expired or self._context.draining.is_set()

    def _part_end(self, **values: Any) -> PartEnd:
        return PartEnd(rank=values.pop("rank", self._row.first_rank), **values)

    def _prepare_job(self) -> tuple[ClaimedRun, Group, dict[str, str]]:
        """Read the job that the lead has written, and check that everything in it is at the same place here.

        Raises:
            JobError: Something is not here.
            LaunchAbandoned: The attempt has ended.
        """
        row, context = self._row, self._context
        with context.engine.connect() as connection:
            run_row = connection.execute(parts.run_of(row.run_id, row.lease_epoch)).one_or_none()
            if run_row is None:
                raise LaunchAbandoned("the attempt has ended")
            run = ClaimedRun.from_row(run_row)
            lead_job = connection.scalar(parts.job_of(row.run_id, row.lease_epoch, row.part))
        if lead_job is None:
            path = context.storage.attempt_dir(run.id, run.attempt) / "job.json"
            self._wait_for(path)
        else:
            path = prepare_part(context, run, JobSpec.model_validate(lead_job), self._restore_control)
        job = JobSpec.from_file(path)
        for needed in _job_paths(job):
            if not needed.exists():
                raise JobError("internal", _is_not_here(needed), is_transient=True)
        # The settings of this worker decide which hosts its processes call, and with which keys.
        job = job.model_copy(update={"reward_hosts": find_reward_hosts(context, job.config)})
        with context.engine.connect() as connection:
            secrets = read_secrets(context, connection, job)
        return run, Group(ENTRY, path, secrets), secrets

    def _wait_for(self, path: Path) -> None:
        """Wait until a file of the shared storage is visible: NFS may still show the folder as it was."""
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while not path.is_file():
            if self._is_unwanted():
                raise LaunchAbandoned("no longer wanted")
            if time.monotonic() > deadline:
                raise JobError("internal", _is_not_here(path), is_transient=True)
            time.sleep(_POLL_SECONDS)

    def _network_watch(self, meeting: Meeting) -> MeetingWatch:
        host, port = meeting.address
        every = self._context.settings.renew_seconds
        return MeetingWatch((host, port), self._context.group_address or "", every)

    def _watch_processes(self, processes: TrainingGroup, handler: RecordHandler, network: MeetingWatch) -> PartEnd:
        """Pass the output on until the processes have ended, or must."""
        lease, most = self._lease, self._context.settings.kill_after_seconds
        is_cut = False
        while (ended := processes.poll()) is None and not lease.fenced and not lease.expired:
            if processes.is_done or (is_cut := network.silent_seconds > most):
                break  # rank 0 may still export for long, which needs none of the devices here
            receive_output(processes, handler)
            if self._context.draining.is_set() and not self._is_leaving:
                self._announce_leaving()
        kill_and_drain(processes, handler)
        handler.log.close()
        if processes.is_done:
            self._verdicts = device_verdicts(self._context, self._devices, {"outcome": "completed"}, 0)
            return self._part_end(exit_code=0)
        if is_cut:
            return self._part_end(problem=_is_cut_off(lease.meeting, most), last_lines=list(handler.state.tail))
        return self._end_from_exit(ended, handler)

    def _end_from_exit(self, ended: Exit | None, handler: RecordHandler) -> PartEnd:
        failure = handler.results.part_failure
        if ended is None and failure is None:
            if self._lease.fenced and self._is_complete():
                self._verdicts = device_verdicts(self._context, self._devices, {"outcome": "completed"}, 0)
            return self._part_end(exit_code=0) if self._lease.fenced else self._part_end(problem=_NOT_RENEWED)
        ended = ended or Exit(rank=self._row.first_rank)
        if ended.signal == signal.SIGALRM and failure is None:
            return self._part_end(rank=ended.rank, problem=_NOT_RENEWED)  # its own timer
        if ended.code == EXIT_RANK_ZERO_UNREACHABLE and failure is None:
            return self._part_end(
                rank=ended.rank,
                problem=_rank_zero_unreachable(self._lease.meeting),
                last_lines=list(handler.state.tail),
            )
        if failure is not None:
            rank, result = failure
            relayed = result.get("rank")
            failed = rank if relayed is None else relayed
            self._verdicts = device_verdicts(self._context, self._devices, result, failed - self._row.first_rank)
        return self._part_end(
            rank=failure[0] if failure else ended.rank,
            exit_code=ended.code,
            exit_signal=ended.signal,
            out_of_memory=ended.out_of_memory,
            launcher_lost=ended.launcher_lost,
            peer_lost=ended.peer_lost,
            failure=dict(failure[1]) if failure else None,
            last_lines=list(handler.state.tail),
        )

    def _is_complete(self) -> bool:
        """Return True if the run has trained to its end; False if the database is unavailable."""
        query = parts.run_of(self._row.run_id, self._row.lease_epoch)
        run_row = self._transact(lambda connection: connection.execute(query).one_or_none())
        return run_row is not None and run_row.status == "completed"

    def _announce_leaving(self) -> None:
        """Let the lead save and release the run, since this worker is shutting down; tried again at the next look."""
        row = self._row
        statement = parts.leave(row.run_id, row.lease_epoch, row.part)
        if self._transact(lambda connection: connection.execute(statement)) is not None:
            self._is_leaving = True
            self._context.publisher.signal_control(row.run_id)


def _part_activity(processes: TrainingGroup, handler: RecordHandler) -> PartActivity:
    return PartActivity(
        silent_seconds=time.monotonic() - handler.state.last_output_at,
        waiting=sorted(handler.state.waiting),
        suspended=list(processes.suspended()),
    )


def _job_paths(job: JobSpec) -> Iterator[Path]:
    yield from (source.path for source in job.datasets)
    yield from (model.path for model in job.models if model.path is not None)


def _rank_zero_unreachable(meeting: str | None) -> str:
    return (
        f"rank 0 could not be reached at {meeting}: check that ANNEAL_GROUP_INTERFACE names the same network on every "
        "host, and that no firewall is between them"
    )


def _is_cut_off(meeting: str | None, seconds: float) -> str:
    return (
        f"the host of rank 0 could not be reached at {meeting} for {seconds:.0f} s, while the database could: check "
        "the network between the hosts that ANNEAL_GROUP_INTERFACE names"
    )


def _is_not_here(path: Path) -> str:
    return (
        f"{path} is not on this worker: mount the storage and the folder of models at the same path on all hosts, or "
        "train on one host (`resources.hosts`)"
    )
