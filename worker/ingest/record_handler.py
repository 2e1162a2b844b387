"""Record handler: turns the output of a training process into events and changes of its run, in order."""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, Executable, case, exists, select, update

from anneal.contracts.attempt.messages import (
    MAX_RECORD_BYTES,
    ActionRecord,
    CheckpointRecord,
    ConfigRecord,
    MessageRecord,
    PhaseRecord,
    ResultRecord,
    TrainingResult,
)
from anneal.contracts.attempt.part_end import PartEnd
from anneal.contracts.attempt.records import COMPLETE_LOG
from anneal.contracts.attempt.run_facts import invalid_facts
from anneal.contracts.events import TRAINER_RECORDS
from anneal.contracts.methods import method_of
from anneal.contracts.run_status import LIVE
from anneal.contracts.run_task import RunTask
from anneal.contracts.training_config.fields import TrainingConfig
from app.infra.ids import new_id
from app.infra.storage import checkpoint_name
from app.infra.terminal_text import plain_text
from app.runs.events.log import LeaseFenced, NewEvent, Progress
from app.runs.state import machine
from app.runs.state.checkpoints import retention
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run
from worker.checkpoint_files import manifest
from worker.checkpoint_store.cleanup import remove_folders
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.action_results import action_result
from worker.ingest.log_file import LogFile
from worker.ingest.log_lines import LogLines
from worker.ingest.pace import AttemptTimer
from worker.ingest.record_budget import BURST_BYTES, BYTES_PER_SECOND, COSTLY_BYTES, LEAST_BYTES, RecordBudget
from worker.ingest.record_parser import invalid_fields, parse_record, validate_record
from worker.ingest.redaction import Redactor
from worker.ingest.spool import RunUpdate
from worker.process.channel import Source
from worker.wire.heartbeat import HEARTBEAT, RESUMED, WAITING

_TAIL_LINES = 50
_ENVELOPE = ("run_id", "seq", "cursor")
"""Fields that the service adds to an event: with one of them, a run could speak for another run."""
_COSTLY_RECORDS = ("phase", "progress", "checkpoint", "config")
"""Records whose event is in the stream of all runs, or which change the run."""
_MAX_BESTS = 10_000
MAX_SERIES = 1000
_MAX_SERIES_NAME = 200
_TOO_MANY_SERIES = (
    f"metrics have more than {MAX_SERIES:,} names, or a name of more than {_MAX_SERIES_NAME} characters: values of "
    "further names are left out, so use the same names at each step"
)
_TOO_FAST = (
    f"the training process reports more than {BURST_BYTES // 2**20} MiB at once and {BYTES_PER_SECOND // 2**20} MiB "
    f"per second after that, where a phase, its progress, a checkpoint or an invalid record counts as "
    f"{COSTLY_BYTES // 2**10} KiB more, and has to wait: report less often, or less text at a time"
)
_MAX_STEPS = 2**31 - 1
_ERROR_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_ERROR_TEXT = 8000
"""Characters of an error, which is part of the run, of its events and of the report of its attempt."""
_MESSAGE = TypeAdapter(MessageRecord)
_CONFIG = TypeAdapter(ConfigRecord)
_PHASE = TypeAdapter(PhaseRecord)
_CHECKPOINT = TypeAdapter(CheckpointRecord)
_ACTION = TypeAdapter(ActionRecord)
_RESULT: TypeAdapter[ResultRecord] = TypeAdapter(ResultRecord)


@dataclass(frozen=True)
class StartPoint:
    """Position in the run at which an attempt starts."""

    step: int
    epoch: float
    best_loss: float | None
    best_score: float | None = None


class EventSink(Protocol):
    """Receiver of events and changes of an attempt."""

    progress: Progress | None
    """Progress of the trainer."""

    def enqueue_item(self, item: NewEvent | RunUpdate) -> None:
        """Append an item; never waits."""


class RecordHandler:
    """Handler of a trainer's output, which it passes to the writer; it stores nothing itself and never waits."""

    def __init__(
        self, context: WorkerContext, run: ClaimedRun, writer: EventSink, log_name: str = COMPLETE_LOG
    ) -> None:
        """Write the complete log of this host's ranks to the files named `log_name` in the attempt's folder."""
        self.result: TrainingResult | None = None
        """Result that the trainer has reported."""
        self.failed_rank = 0
        """Rank on which the failure happened, if the result is one."""
        self.effective: dict[str, Any] | None = None
        """Configuration that the trainer actually uses, once it has reported it."""
        self.phase = "loading"
        self.training_started = False
        """True once the trainer has reached its first step, or the evaluation that is its task."""
        self.last_output_at = time.monotonic()
        """Monotonic time of the last output, of any kind; once training has started, of rank 0.

        Before that, each rank may work for long while rank 0 waits for it. In training, rank 0 is silent then.
        """
        self.waiting: set[int] = set()
        """Ranks of this host that wait for others; known until training starts."""
        self.step: int | None = None
        """Last step that the trainer reported; before that, the one from which it starts."""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """Last lines of the log."""
        self._context = context
        self._log_name = log_name
        self._run = run
        self._writer = writer
        self._start = StartPoint(0, 0.0, None)
        self._bests: list[tuple[int, float | None]] = [(0, None)]
        """Steps at which the loss reached a new minimum, as far back as a checkpoint may still refer to."""
        self._best_score: float | None = None
        self._total_steps: int | None = None
        self._series: set[str] = set()
        """Names of the values in metrics and evaluations: each is a curve, in memory as long as the attempt."""
        self._has_too_many_series = False
        """True once a line of the log has said that values are left out."""
        self._budget = RecordBudget()
        self._has_waited = False
        """True once a line of the log has said that the trainer waits because of its budget."""
        self._redact = Redactor()
        self._lines: dict[int, LogLines] = {}
        """Unfinished lines of each rank."""
        self._printed_at = 0.0
        """Time of the output that is being handled, in seconds since 1970."""
        self._log_file = LogFile(
            context.storage.attempt_dir(run.id, run.attempt),
            log_name,
            context.settings.disk_reserve_bytes,
            lambda problem: self.log_line(problem, "warning"),
        )
        self._is_log_short = False
        """True while printed lines are not stored, because the disk of the database has little room."""
        self._other_failures: dict[int, TrainingResult] = {}
        """Failures of other ranks than 0."""
        self._status = "initializing"
        self._stopwatch = AttemptTimer(run)
        self._handlers: dict[str, Callable[[dict[str, Any], float], None]] = {
            "message": self._handle_message,
            "config": self._handle_config,
            "metric": self._handle_metric,
            "phase": self._handle_phase,
            "checkpoint": self._handle_checkpoint,
            "action": self._handle_action,
            "result": self._handle_result,
            **dict.fromkeys(TRAINER_RECORDS, self._handle_plain),
            "eval": self._handle_eval,
        }

    def start_from(self, start: StartPoint, secrets: Iterable[str], remarks: Iterable[str]) -> None:
        """Start from the job's checkpoint; metrics beyond its step are rolled back."""
        self._start, self._bests, self.step = start, [(start.step, start.best_loss)], start.step
        self._best_score = start.best_score
        self.hide_secrets(secrets)
        for remark in remarks:
            self.log_line(remark, "warning")

    def hide_secrets(self, secrets: Iterable[str]) -> None:
        """Mask these values in the output from now on."""
        self._redact.hide_values(secrets)

    def handle_output(self, pieces: Sequence[tuple[Source, bytes]], rank: int = 0) -> None:
        """Dispatch data received from a rank to the handlers of records and lines.

        Of ranks other than 0, lines are stored with their rank, and of records only a failure counts.
        """
        now = self._printed_at = time.time()
        if pieces and (rank == 0 or not self.training_started):
            self.last_output_at = time.monotonic()
        for source, data in pieces:
            if source == "report":
                self._handle_record(data, now, rank)
            else:
                self._add_lines(self._lines_of(rank).feed(source, data, time.monotonic()), now)
        self._log_file.flush()
        if self.is_over_budget and not self._has_waited:
            self._has_waited = True
            self.log_line(_TOO_FAST, "warning")

    @property
    def part_failure(self) -> tuple[int, TrainingResult] | None:
        """First failure that another rank than 0 has reported, with the rank; of a part, this is all there can be."""
        return next(iter(self._other_failures.items()), None)

    @property
    def is_over_budget(self) -> bool:
        """True if the trainer has sent so many bytes of records that it has to wait before more are read."""
        return self._budget.is_spent(time.monotonic())

    def log_line(self, line: str, level: str = "info") -> None:
        """Add a line from the service itself to the run's log."""
        now = time.time()
        said = {"line": plain_text(line), "stream": "anneal", "level": level}
        self._log_file.add_line(said, now)
        self._add_lines([said], now)
        self._log_file.flush()

    def flush_lines(self) -> None:
        """Handle the end of the output: what is left of a line becomes a line, and the complete log is closed."""
        self._printed_at = time.time()
        for lines in self._lines.values():
            self._add_lines(lines.flush(), self._printed_at)
        self._log_file.close()

    def flush_output(self) -> None:
        """Handle the end of the output. Without a result of rank 0, the failure of another rank is the result."""
        self.flush_lines()
        if self.result is None and self._other_failures:
            rank, result = next(iter(self._other_failures.items()))
            relayed = result.get("rank")
            self.failed_rank = rank if relayed is None else relayed
            if (error := result.get("error")) and relayed is None:
                error["message"] = f"On rank {self.failed_rank}: {error['message']}"
            self._end_with(result)

    def take_part_end(self, end: PartEnd) -> None:
        """Take over the last lines of a part on another host, and a failure that one of its ranks has reported."""
        self.tail.extend(end.last_lines)
        if end.failure is not None:
            self._other_failures[end.rank] = self._read_result({"type": "result", **end.failure})

    def _lines_of(self, rank: int) -> LogLines:
        if rank not in self._lines:
            self._lines[rank] = LogLines(
                redact=self._redact,
                label=f"[rank {rank}] " if rank else "",
                on_line=lambda line: self._log_file.add_line(line, self._printed_at),
                place=self._place_of_complete_log,
                shortage=self._log_shortage,
            )
        return self._lines[rank]

    def _place_of_complete_log(self) -> str:
        if not self._log_file.is_complete:
            return ""  # the log has a line that says why
        if self._log_name != COMPLETE_LOG and self._context.working_copy is not None:
            return "; a file on the worker of this rank has them"  # only the lead sends records to the object store
        return f"; the complete log has them: `anneal runs logs --all {self._run.id} --attempt {self._run.attempt}`"

    def _log_shortage(self) -> str | None:
        """Return why printed lines are not stored now: they would take the room of everything else."""
        reserve = self._context.database_reserve
        shortage = reserve.describe_shortage(self._context.settings.disk_reserve_bytes) if reserve is not None else None
        if shortage and not self._is_log_short:
            self.log_line(
                f"printed lines are not stored from here on, because {shortage}; the last ones follow", "warning"
            )
        self._is_log_short = shortage is not None
        return shortage

    def _add_lines(self, lines: list[dict[str, Any]], now: float) -> None:
        for line in lines:
            self.tail.append(line["line"])
            self._writer.enqueue_item(NewEvent.from_payload("log", now, line))

    def _handle_record(self, data: bytes, now: float, rank: int) -> None:
        self._budget.spend_bytes(max(len(data), LEAST_BYTES), time.monotonic())
        if data == HEARTBEAT:
            return  # a heartbeat: receiving it was enough
        if data == WAITING:
            self.waiting.add(rank)
            return
        if data == RESUMED:
            self.waiting.discard(rank)
            return
        try:
            if len(data) > MAX_RECORD_BYTES:
                raise ValueError(f"it has {len(data):,} bytes, and at most {MAX_RECORD_BYTES:,} are allowed")
            record = parse_record(data, self._redact)
            if record is None:
                raise ValueError("it is not an object with a `type`")
            ts = record.pop("ts", None) or now
            for name in _ENVELOPE:
                record.pop(name, None)
            handle = self._handlers.get(record["type"]) if rank == 0 else self._handler_of(rank, record)
            if handle is None:
                raise ValueError(f"unknown type {record['type']!r}")
            if record["type"] in _COSTLY_RECORDS:
                self._budget.spend_bytes(COSTLY_BYTES, time.monotonic())
            handle(record, ts)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
            self._budget.spend_bytes(COSTLY_BYTES, time.monotonic())
            shown = repr(self._redact.cut_text(data.decode(errors="replace"), 200))
            self.log_line(f"the training process sent an invalid record ({error!r}): {shown}", "error")

    def _handle_message(self, record: dict[str, Any], ts: float) -> None:
        message = validate_record(_MESSAGE, record)
        line = {"line": plain_text(message["line"]), "stream": "anneal", "level": message.get("level", "info")}
        self._log_file.add_line(line, self._printed_at)
        self._writer.enqueue_item(NewEvent.from_payload("log", ts, line))

    def _handle_plain(self, record: dict[str, Any], ts: float) -> None:
        """Store a record that is an event as it is."""
        self._writer.enqueue_item(NewEvent.from_payload(record.pop("type"), ts, record))

    def _handle_config(self, record: dict[str, Any], ts: float) -> None:
        reported = validate_record(_CONFIG, record)
        effective, facts = reported["effective"], reported["facts"]
        if ignored := invalid_facts(facts):  # estimates of other users' runs compute with them
            self.log_line(f"invalid facts of the run are ignored: {', '.join(ignored)}", "warning")
            record["facts"] = {name: value for name, value in facts.items() if name not in ignored}
        event = NewEvent.from_payload(record.pop("type"), ts, record)
        try:
            TrainingConfig.model_validate(effective)
        except ValidationError as error:  # repairs and post-mortems compute with it
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            self.log_line(f"the reported configuration is invalid and not used (`{where}`: {first['msg']})", "warning")
            self._writer.enqueue_item(event)
            return
        self.effective = effective

        def store_effective_config(connection: Connection) -> None:
            connection.execute(
                update(Run)
                .where(Run.id == self._run.id, Run.lease_epoch == self._run.lease_epoch)
                .values(effective_config=effective)
            )

        self._writer.enqueue_item(RunUpdate(store_effective_config, event))

    def _handle_metric(self, record: dict[str, Any], ts: float) -> None:
        """Store a `MetricRecord`; frequent, so that only what is used here is checked."""
        del record["type"]
        loss, best = record.get("loss"), self._bests[-1][1]
        self._set_total(record.pop("total_steps", None))
        self._limit_series(record.get("extra"))
        event = NewEvent.from_payload("metric", ts, record)
        step = _checked_count(record["step"], "step")
        if isinstance(loss, float | int) and (best is None or loss < best):
            self._bests.append((step, float(loss)))
            if len(self._bests) > _MAX_BESTS:
                del self._bests[1:-1:2]  # a checkpoint may then have the best loss of an earlier step
        self._set_progress(step, float(record.get("epoch") or 0))
        self._writer.enqueue_item(event)
        self._stopwatch.record_step(step)
        self._store_timings(self._stopwatch.is_due)

    def _handle_eval(self, record: dict[str, Any], ts: float) -> None:
        """Store an evaluation, and the score of the run if it is the best so far."""
        self._limit_series(record.get("metrics"))
        event = NewEvent.from_payload(record.pop("type"), ts, record)
        method = method_of(self._run.config)
        value = (record.get("metrics") or {}).get(method.eval_metric)
        if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value):
            self._writer.enqueue_item(event)
            return
        score = method.to_score(float(value))
        if self._best_score is not None and score >= self._best_score:
            self._writer.enqueue_item(event)
            return
        self._best_score = score

        def store_best_score(connection: Connection) -> None:
            connection.execute(
                update(Run)
                .where(Run.id == self._run.id, Run.lease_epoch == self._run.lease_epoch)
                .values(best_score=score)
            )

        self._writer.enqueue_item(RunUpdate(store_best_score, event))

    def _limit_series(self, values: Any) -> None:
        """Remove the values of further names than an attempt may have."""
        if not isinstance(values, dict) or values.keys() <= self._series:
            return
        for name in [name for name in values if name not in self._series]:
            if len(self._series) < MAX_SERIES and len(name) <= _MAX_SERIES_NAME:
                self._series.add(name)
                continue
            del values[name]
            if not self._has_too_many_series:
                self._has_too_many_series = True
                self.log_line(_TOO_MANY_SERIES, "warning")

    def _set_progress(self, step: int, epoch: float) -> None:
        self.step = step
        self._writer.progress = Progress(step, epoch, self._total_steps, self._bests[-1][1])

    def _best_at(self, step: int) -> float | None:
        """Return the lowest loss up to `step`; earlier values are dropped, because checkpoints arrive in order."""
        while len(self._bests) > 1 and self._bests[1][0] <= step:
            self._bests.pop(0)
        return self._bests[0][1]

    def _set_total(self, total: Any) -> None:
        if total:
            self._total_steps = _checked_count(total, "total_steps")
            self._stopwatch.set_total_steps(self._total_steps)

    def _handle_result(self, record: dict[str, Any], _ts: float) -> None:
        result = self._read_result(record)
        self.failed_rank = result.get("rank") or 0
        self._end_with(result)

    def _handler_of(self, rank: int, record: dict[str, Any]) -> Callable[[dict[str, Any], float], None] | None:
        def note_failure(result: dict[str, Any], _ts: float) -> None:
            self._other_failures[rank] = self._read_result(result)

        return note_failure if record["type"] == "result" and record.get("outcome") == "failed" else None

    def _read_result(self, record: dict[str, Any]) -> TrainingResult:
        # An invalid detail, perhaps of a plugin, must not cost a run its outcome.
        if ignored := sorted(invalid_fields(_RESULT, record) - {"outcome"}):
            self.log_line(f"invalid fields of the result are ignored: {', '.join(ignored)}", "warning")
        result = validate_record(_RESULT, {name: value for name, value in record.items() if name not in ignored})
        if error := result.get("error"):
            error["code"] = error["code"] if _ERROR_CODE.fullmatch(error["code"]) else "internal"
            error["message"] = plain_text(error["message"])[:_MAX_ERROR_TEXT]
            if details := error.get("details"):
                details["summary"] = plain_text(details["summary"])[:_MAX_ERROR_TEXT]
        return result

    def _end_with(self, result: TrainingResult) -> None:
        self.result = result
        self._stopwatch.record_end(result["outcome"])
        self._store_timings(self._stopwatch.training_started)

    def _store_timings(self, is_due: bool) -> None:
        if is_due:
            self._writer.enqueue_item(RunUpdate(self._stopwatch.timings_update()))

    def _handle_phase(self, record: dict[str, Any], ts: float) -> None:
        entered = validate_record(_PHASE, record)
        self.phase = entered["name"]
        run_id, lease_epoch = self._run.id, self._run.lease_epoch
        start = self._start
        self._stopwatch.enter_phase(self.phase, start.step)
        progress = {"phase": self.phase, "done": None, "total": None, "message": self.phase}
        self._writer.enqueue_item(NewEvent.from_payload("progress", ts, progress))
        main_phase = "training" if self._run.task == RunTask.train else "evaluating"
        if self.phase == main_phase and not self.training_started:
            self.training_started = True
            self._set_total(entered.get("total_steps"))
            self._move_run(
                machine.begin(
                    run_id,
                    lease_epoch,
                    start.step,
                    start.epoch,
                    self._total_steps,
                    self._bests[-1][1],
                    self._best_score,
                ),
                "running",
            )
            self._store_timings(self._stopwatch.is_due)
        elif self.phase == "saving" and self._status == "running":
            self._move_run(machine.begin_save(run_id, lease_epoch), "checkpointing")
        elif self.phase != "saving" and self._status == "checkpointing":
            self._move_run(machine.end_save(run_id, lease_epoch), "running")

    def _move_run(self, statement: Executable, target: str) -> None:
        def apply_transition(connection: Connection) -> None:
            if connection.execute(statement).one_or_none() is None:
                now = connection.execute(
                    select(Run.lease_epoch, Run.status).where(Run.id == self._run.id)
                ).one_or_none()
                # An earlier try may have been committed although its response was lost.
                if now is None or now.lease_epoch != self._run.lease_epoch or now.status != target:
                    raise LeaseFenced(self._run.id)

        self._status = target
        self._writer.enqueue_item(RunUpdate(apply_transition))

    def _handle_checkpoint(self, received: dict[str, Any], ts: float) -> None:
        record = validate_record(_CHECKPOINT, received)
        checkpoint_id = new_id("ckpt")
        run = self._run
        step = _checked_count(record["step"], "step")
        # The name becomes the path of a folder that is removed later.
        if record["name"] != checkpoint_name(step):
            raise ValueError(f"a checkpoint at step {step} must be named {checkpoint_name(step)}")
        epoch, metrics = record.get("epoch") or 0.0, record.get("metrics") or {}
        row = {
            "id": checkpoint_id,
            "run_id": run.id,
            "attempt": run.attempt,
            "name": record["name"],
            "step": step,
            "epoch": epoch,
            "kind": record["kind"],
            "bytes": record["bytes"],
            "manifest_sha256": record["manifest_sha256"],
            "save_seconds": record.get("seconds"),
            "pinned": bool(record.get("pinned")),
            "metrics": {
                **{name: value for name, value in metrics.items() if isinstance(value, int | float)},
                "best_loss": self._best_at(step),
            },
        }
        retired: list[tuple[int, str]] = []
        folder = self._context.storage.checkpoint_dir(run.id, run.attempt, step)
        is_in_place = manifest.is_in_place(folder, record["manifest_sha256"], step)

        def store_checkpoint(connection: Connection) -> None:
            if connection.scalar(select(Checkpoint.id).where(Checkpoint.id == checkpoint_id)):
                return
            connection.execute(Checkpoint.__table__.insert().values(row))  # type: ignore[attr-defined]
            # A run that makes progress between two losses may be lost any number of times. To save a step again is
            # none: the checkpoint of the earlier attempt was lost, and that of this one may be too.
            other = exists().where(Checkpoint.run_id == run.id, Checkpoint.step >= step, Checkpoint.id != checkpoint_id)
            losses = case((~other, 0), else_=Run.lost_count) if is_in_place else Run.lost_count
            connection.execute(
                update(Run)
                .where(Run.id == run.id, Run.lease_epoch == run.lease_epoch, Run.status.in_(LIVE))
                .values(lost_count=losses, checkpoint_step=step)
            )
            keep_last = run.config.get("save_total_limit")
            if keep_last:
                retired[:] = retention.retire_checkpoints(connection, run.id, keep_last)
            for answer in answered:
                connection.execute(answer.change)

        if self._writer.progress is None or self._writer.progress.step < step:
            # It is reported once it is on disk, and training may have continued meanwhile.
            self._set_progress(step, epoch)
        data = {"checkpoint_id": checkpoint_id, "step": row["step"], "kind": row["kind"], "bytes": row["bytes"]}
        event = NewEvent.from_payload("checkpoint", ts, data)
        # One transaction: an action is done when its checkpoint exists, and the checkpoint does not exist without it.
        result: dict[str, object] = {"checkpoint_id": checkpoint_id, "pinned": row["pinned"]}
        answered = [
            action_result(
                run,
                {
                    "type": "action",
                    "id": asked["id"],
                    "action": asked["action"],
                    "step": step,
                    "status": "done",
                    "result": result,
                },
                ts,
            )
            for asked in record.get("actions", ())
        ]
        more = tuple(one.event for one in answered)

        def after_storing() -> None:
            remove_folders(self._context, run.id, retired)
            if self._context.uploader:
                self._context.uploader.queue_checkpoint(SimpleNamespace(**row))
                self._context.uploader.schedule_sweep()

        self._writer.enqueue_item(RunUpdate(store_checkpoint, event, after_storing, more))

    def _handle_action(self, received: dict[str, Any], ts: float) -> None:
        record = validate_record(_ACTION, received)
        answered = action_result(self._run, record, ts)
        if record.get("total_steps"):
            self._set_total(record["total_steps"])
            self._set_progress(_checked_count(record["step"], "step"), float(record.get("epoch") or 0))

        def store_result(connection: Connection) -> None:
            connection.execute(answered.change)

        self._writer.enqueue_item(RunUpdate(store_result, answered.event))


def _checked_count(value: Any, name: str) -> int:
    """Return a number of steps, checked to fit the database."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_STEPS:
        raise ValueError(f"`{name}` must be a whole number from 0 to {_MAX_STEPS:,}")
    return value
