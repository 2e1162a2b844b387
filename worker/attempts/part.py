"""Life of a part of a run on this worker, whose lead is another one: renew → wait for the lead → launch → watch → end.

The lead decides about the run; this worker stores for it only how the part has ended. The part ends with the lead's
attempt: its lease is then not renewed any more.
"""

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sqlalchemy import Executable, Row
from sqlalchemy.exc import SQLAlchemyError

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.attempt.part_activity import PartActivity
from anneal.contracts.attempt.part_end import PartEnd
from anneal.contracts.attempt.records import part_log
from app.infra.db import is_away
from app.infra.lean_structlog import bound_contextvars
from app.infra.log_setup import with_current_context
from app.runs.events import log as event_log
from app.runs.events.log import LeaseFenced, NewEvent, Progress
from app.runs.state import parts
from app.workers import registry
from worker.attempts import device_checks
from worker.attempts.job_builder import secrets_of
from worker.attempts.job_error import JobError
from worker.attempts.launch import Group, Meeting, launch_processes
from worker.attempts.outcome import device_verdicts
from worker.attempts.part_job import prepare_part
from worker.checkpoint_store import cleanup
from worker.checkpoint_store.remote_store import TransferCancelled
from worker.checkpoint_store.restore import RestoreControl
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.devices import Device
from worker.group_network import MeetingWatch
from worker.health import UNUSABLE_PAUSE_SECONDS
from worker.ingest.record_handler import RecordHandler
from worker.ingest.spool import RunUpdate
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
_LOG_SECONDS = 0.2
_MOST_LINES = 2000
"""Log lines that may wait for the database; older ones are dropped."""


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
        part = _train_part(context, row)
        if part is not None:
            part.clean_up_after_attempt()


def _train_part(context: WorkerContext, row: Row[Any]) -> "_Part | None":
    """Train a part until its end is stored; return it, or None if a process of it does not end."""
    with PartLease(context, row.run_id, row.lease_epoch, row.part) as lease:
        log.info("%s: trains a part from rank %d on", row.run_id, row.first_rank)
        part = _Part(context, row, lease)
        try:
            end = part.train()
        except StillAliveError:
            # The devices stay taken until the lease has expired, and those processes hold the locks.
            log.exception("%s: a process of the part does not end", row.run_id)
            return None
        except Exception as error:
            # Not its text, which may be that of the database, with the values of a statement.
            log.exception("%s: a part of the run", row.run_id)
            problem = (
                f"an internal error of the worker ({type(error).__name__}); an operator finds the cause in its log"
            )
            end = PartEnd(rank=row.first_rank, problem=problem)
        part.store_end(end)
        log.info("%s: its part has ended", row.run_id)
        return part


class _Part:
    def __init__(self, context: WorkerContext, row: Row[Any], lease: PartLease) -> None:
        self._context = context
        self._row = row
        self._lease = lease
        by_index = {device.index: device for device in context.machine.devices}
        self._assigned: list[Device] = [by_index[index] for index in row.device_indexes]
        self._verdicts: list[Executable] = []
        """Statements about the devices, from how the part has ended."""
        self._is_leaving = False
        self._attempt: int | None = None
        """Number of the attempt, once processes of it were started here."""
        self._worked_at = time.monotonic()
        """Monotonic time of the last progress before there were processes."""
        self._restore_control = RestoreControl(self._should_end, lambda _: None)
        lease.activity = lambda: PartActivity(silent_seconds=time.monotonic() - self._worked_at)

    def train(self) -> PartEnd:
        """Wait until the lead has prepared the attempt, start the processes and watch them to their end."""
        while self._lease.meeting is None:
            if self._lease.fenced or self._context.draining.is_set():
                return self._not_started()
            time.sleep(_POLL_SECONDS)
        if (unusable := self._unusable_device()) is not None:
            return unusable
        try:
            run, group, secrets = self._prepare_when_available()
            meeting = Meeting(self._lease.meeting, self._row.first_rank, run.devices_needed)
            processes = launch_processes(self._context, self._lease, group, self._assigned, self._is_unwanted, meeting)
        except (LaunchAbandoned, TransferCancelled):
            return self._not_started()
        except (JobError, LaunchError, OSError, ValueError) as error:
            problem = error.message if isinstance(error, JobError) else str(error)
            self._context.health.record_failed_start(problem)
            return self._part_end(problem=problem)
        self._context.health.record_start()
        self._attempt = run.attempt
        with _PartLog(self._context, run) as sink:
            handler = RecordHandler(self._context, run, sink, part_log(self._row.first_rank))
            handler.hide_secrets(secrets.values())
            self._lease.activity = lambda: _part_activity(processes, handler)
            try:
                with self._network_watch(meeting) as network:
                    return self._watch_processes(processes, handler, network)
            finally:
                processes.close()

    def store_end(self, end: PartEnd) -> None:
        """Store the end and free the devices, as soon as the database is available; then notify the lead."""
        row = self._row
        outcome = end.model_dump(mode="json")
        while True:
            try:
                with self._context.engine.begin() as connection:
                    for statement in (
                        *parts.end(row.run_id, row.lease_epoch, row.part, self._context.id, outcome),
                        *self._verdicts,
                    ):
                        connection.execute(statement)
                break
            except SQLAlchemyError as error:
                if not is_away(error):
                    raise
                log.info("%s: the end of its part waits for the database: %s", row.run_id, error)
                time.sleep(_RETRY_SECONDS)
        self._context.signal_control(row.run_id)

    def clean_up_after_attempt(self) -> None:
        """Remove what the processes have left half written, once the attempt is over: until then its lead may write."""
        row, context = self._row, self._context
        while self._attempt is not None and not context.closing.is_set():
            try:
                with context.engine.connect() as connection:
                    is_live = bool(connection.scalar(parts.is_live(row.run_id, row.lease_epoch)))
            except SQLAlchemyError as error:
                if not is_away(error):
                    raise
                is_live = True
            if not is_live:
                cleanup.after_attempt(context, row.run_id, self._attempt)
                return
            context.closing.wait(context.settings.renew_seconds)

    def _unusable_device(self) -> PartEnd | None:
        """Return the end of the part, and pause the device, if another program took one since the claim."""
        context = self._context
        for local_rank, device in enumerate(self._assigned):
            if (why := device_checks.unusable_reason(context, device)) is not None:
                context.health.unusable.add(device.index)
                self._verdicts = [registry.pause_device(context.id, device.index, why, UNUSABLE_PAUSE_SECONDS)]
                rank = self._row.first_rank + local_rank
                return self._part_end(rank=rank, problem=f"device {device.index} cannot be used: {why}")
        return None

    def _should_end(self) -> bool:
        self._worked_at = time.monotonic()
        return self._is_unwanted()

    def _is_unwanted(self) -> bool:
        return self._lease.fenced or self._lease.expired or self._context.draining.is_set()

    def _not_started(self) -> PartEnd:
        if self._lease.fenced:
            return self._part_end(exit_code=0)
        return (
            self._part_end(is_released=True)
            if self._context.draining.is_set()
            else self._part_end(problem=_NOT_RENEWED)
        )

    def _part_end(self, **values: Any) -> PartEnd:
        return PartEnd(rank=values.pop("rank", self._row.first_rank), **values)

    def _prepare_when_available(self) -> tuple[ClaimedRun, Group, dict[str, str]]:
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
        with context.engine.connect() as connection:
            secrets = secrets_of(context, connection, run.config, [job.base_model, *job.reward_models])
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
            if handler.is_over_budget:
                time.sleep(_POLL_SECONDS)
            else:
                processes.wait(_POLL_SECONDS)
                for rank, pieces in processes.receive():
                    handler.handle_output(pieces, rank)
            if self._context.draining.is_set() and not self._is_leaving:
                self._announce_leaving()
        processes.kill()
        for rank, pieces in processes.drain():
            handler.handle_output(pieces, rank)
        handler.flush_lines()
        if processes.is_done:
            self._verdicts = device_verdicts(self._context, self._assigned, {"outcome": "completed"}, 0)
            return self._part_end(exit_code=0)
        if is_cut:
            return self._part_end(problem=_is_cut_off(lease.meeting, most), last_lines=list(handler.tail))
        return self._end_from_exit(ended, handler)

    def _end_from_exit(self, ended: Exit | None, handler: RecordHandler) -> PartEnd:
        failure = handler.part_failure
        if ended is None and failure is None:
            if self._lease.fenced and self._is_complete():
                self._verdicts = device_verdicts(self._context, self._assigned, {"outcome": "completed"}, 0)
            return self._part_end(exit_code=0) if self._lease.fenced else self._part_end(problem=_NOT_RENEWED)
        ended = ended or Exit(rank=self._row.first_rank)
        if ended.signal == signal.SIGALRM and failure is None:
            return self._part_end(rank=ended.rank, problem=_NOT_RENEWED)  # its own timer
        if ended.code == EXIT_RANK_ZERO_UNREACHABLE and failure is None:
            return self._part_end(
                rank=ended.rank, problem=_rank_zero_unreachable(self._lease.meeting), last_lines=list(handler.tail)
            )
        if failure is not None:
            rank, result = failure
            relayed = result.get("rank")
            failed = rank if relayed is None else relayed
            self._verdicts = device_verdicts(self._context, self._assigned, result, failed - self._row.first_rank)
        return self._part_end(
            rank=failure[0] if failure else ended.rank,
            exit_code=ended.code,
            exit_signal=ended.signal,
            out_of_memory=ended.out_of_memory,
            launcher_lost=ended.launcher_lost,
            peer_lost=ended.peer_lost,
            failure=dict(failure[1]) if failure else None,
            last_lines=list(handler.tail),
        )

    def _is_complete(self) -> bool:
        """Return True if the run has trained to its end; False if the database is unavailable."""
        row = self._row
        try:
            with self._context.engine.connect() as connection:
                run_row = connection.execute(parts.run_of(row.run_id, row.lease_epoch)).one_or_none()
        except SQLAlchemyError as error:
            if not is_away(error):
                raise
            return False
        return run_row is not None and run_row.status == "completed"

    def _announce_leaving(self) -> None:
        """Let the lead save and release the run, since this worker is shutting down."""
        row = self._row
        try:
            with self._context.engine.begin() as connection:
                connection.execute(parts.leave(row.run_id, row.lease_epoch, row.part))
        except SQLAlchemyError as error:
            if not is_away(error):
                raise
            return  # tried again at the next look
        self._is_leaving = True
        self._context.signal_control(row.run_id)


def _part_activity(processes: TrainingGroup, handler: RecordHandler) -> PartActivity:
    return PartActivity(
        silent_seconds=time.monotonic() - handler.last_output_at,
        waiting=sorted(handler.waiting),
        suspended=list(processes.suspended()),
    )


def _job_paths(job: JobSpec) -> Iterator[Path]:
    yield from (source.path for source in job.datasets)
    yield from (model.path for model in (job.base_model, *job.reward_models) if model.path is not None)


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


class _PartLog:
    """Sink of the log lines of a part, stored from a thread of its own.

    A line may get lost with the database, since only the lead can check which of its events are stored.
    """

    def __init__(self, context: WorkerContext, run: ClaimedRun) -> None:
        self.progress: Progress | None = None
        self._context = context
        self._run = run
        self._waiting: deque[NewEvent] = deque(maxlen=_MOST_LINES)
        self._dropped = 0
        """Lines that are lost: too many waited for the database, or it did not take them."""
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=with_current_context(self._write_batches), name=f"log {run.id}", daemon=True
        )

    def __enter__(self) -> "_PartLog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def enqueue_item(self, item: NewEvent | RunUpdate) -> None:
        """Append a log line."""
        if isinstance(item, NewEvent):
            self._dropped += len(self._waiting) == _MOST_LINES
            self._waiting.append(item)

    def _write_batches(self) -> None:
        while True:
            is_last = self._over.wait(_LOG_SECONDS)
            if batch := [self._waiting.popleft() for _ in range(len(self._waiting))]:
                self._store_lines(batch)
            if is_last:
                return

    def _store_lines(self, batch: Sequence[NewEvent]) -> None:
        try:
            with self._context.engine.begin() as connection:
                event_log.append_lines(connection, self._run.id, self._run.lease_epoch, batch)
        except LeaseFenced:
            return  # the attempt has ended
        except SQLAlchemyError as error:
            if len(batch) > 1 and not is_away(error):  # one line must not cost the others
                half = len(batch) // 2
                self._store_lines(batch[:half])
                self._store_lines(batch[half:])
                return
            self._dropped += len(batch)
            log.warning("%s: %d log lines of its part are not stored: %s", self._run.id, self._dropped, error)
            return
        self._context.wake_streams(self._run.id)
