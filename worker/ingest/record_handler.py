"""Record handler: turns the output of a training process into events and changes of its run, in order."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from anneal.contracts.attempt.messages import MAX_RECORD_BYTES, AnswersRecord, MessageRecord
from anneal.contracts.attempt.part_end import PartEnd
from anneal.contracts.attempt.records import COMPLETE_LOG
from anneal.contracts.events import TRAINER_RECORDS
from app.runs.events.log import NewEvent
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.attempt_state import AttemptState, StartPoint
from worker.ingest.record_budget import BURST_BYTES, BYTES_PER_SECOND, COSTLY_BYTES, LEAST_BYTES, RecordBudget
from worker.ingest.record_parser import parse_record, validate_record
from worker.ingest.recorders.checkpoints import CheckpointRecorder
from worker.ingest.recorders.configurations import ConfigurationRecorder
from worker.ingest.recorders.metrics import MetricRecorder
from worker.ingest.recorders.phases import PhaseRecorder
from worker.ingest.recorders.results import ResultRecorder
from worker.ingest.run_log import RunLog
from worker.ingest.sink import EventSink
from worker.process.channel import Source
from worker.wire.heartbeat import HEARTBEAT, RESUMED, WAITING

_ENVELOPE = ("run_id", "seq", "cursor")
"""Fields that the service adds to an event: with one of them, a run could speak for another run."""
_COSTLY_RECORDS = ("phase", "progress", "checkpoint", "config")
"""Records whose event is in the stream of all runs, or which change the run."""
_TOO_FAST = (
    f"the training process reports more than {BURST_BYTES // 2**20} MiB at once and {BYTES_PER_SECOND // 2**20} MiB "
    f"per second after that, where a phase, its progress, a checkpoint or an invalid record counts as "
    f"{COSTLY_BYTES // 2**10} KiB more, and has to wait: report less often, or less text at a time"
)


class RecordHandler:
    """Handler of a trainer's output, which its recorders pass to the sink; it stores nothing itself and never waits."""

    def __init__(
        self,
        context: WorkerContext,
        run: ClaimedRun,
        sink: EventSink,
        log_name: str = COMPLETE_LOG,
        on_answers: Callable[[Sequence[Mapping[str, Any]]], None] | None = None,
    ) -> None:
        """Write the complete log of this host's ranks to the files named `log_name` in the attempt's folder.

        `on_answers` gets the answers of a serving run, which are not stored.
        """
        self.state = AttemptState()
        self.log = RunLog(context, run, sink, self.state.tail, log_name)
        self.metrics = MetricRecorder(run, sink, self.state, self.log.log_line)
        self.results = ResultRecorder(self.state, self.metrics, self.log.log_line)
        self._sink = sink
        self._on_answers = on_answers
        self._budget = RecordBudget()
        self._has_waited = False
        """True once a line of the log has said that the trainer waits because of its budget."""
        checkpoints = CheckpointRecorder(context, run, sink, self.metrics)
        self._recorders: dict[str, Callable[[dict[str, Any], float], None]] = {
            **dict.fromkeys(TRAINER_RECORDS, self._record_event),
            "message": self._record_message,
            "config": ConfigurationRecorder(run, sink, self.state, self.log.log_line).record_configuration,
            "phase": PhaseRecorder(run, sink, self.state, self.metrics).record_phase,
            "metric": self.metrics.record_metric,
            "eval": self.metrics.record_evaluation,
            "checkpoint": checkpoints.record_checkpoint,
            "action": checkpoints.record_action,
            "result": self.results.record_result,
            "answers": self._record_answers,
        }
        """Method that records each type of record of rank 0."""

    @property
    def is_over_budget(self) -> bool:
        """True if the trainer has sent so many bytes of records that it has to wait before more are read."""
        return self._budget.is_spent(time.monotonic())

    def start_from(self, start: StartPoint, secrets: Iterable[str], remarks: Iterable[str]) -> None:
        """Start from the job's checkpoint; metrics beyond its step are rolled back."""
        self.metrics.start_from(start)
        self.log.hide_secrets(secrets)
        for remark in remarks:
            self.log.log_line(remark, "warning")

    def handle_output(self, pieces: Sequence[tuple[Source, bytes]], rank: int = 0) -> None:
        """Dispatch data received from a rank to the log and to the recorders.

        Of ranks other than 0, lines are stored with their rank, and of records only a failure counts.
        """
        now = self.log.printed_at = time.time()
        if pieces and (rank == 0 or not self.state.training_started):
            self.state.last_output_at = time.monotonic()
        for source, data in pieces:
            if source == "report":
                self._handle_record(data, now, rank)
            else:
                self.log.add_output(rank, source, data)
        self.log.flush()
        if self.is_over_budget and not self._has_waited:
            self._has_waited = True
            self.log.log_line(_TOO_FAST, "warning")

    def flush_output(self) -> None:
        """Handle the end of the output. Without a result of rank 0, the failure of another rank is the result."""
        self.log.close()
        self.results.conclude()

    def take_part_end(self, end: PartEnd) -> None:
        """Take over the last lines of a part on another host, and a failure that one of its ranks has reported."""
        self.state.tail.extend(end.last_lines)
        if end.failure is not None:
            self.results.record_failure(end.rank, {"type": "result", **end.failure})

    def _handle_record(self, data: bytes, now: float, rank: int) -> None:
        self._budget.spend_bytes(max(len(data), LEAST_BYTES), time.monotonic())
        if data == HEARTBEAT:
            return  # receiving it was enough
        if data in (WAITING, RESUMED):
            (self.state.waiting.add if data == WAITING else self.state.waiting.discard)(rank)
            return
        try:
            if len(data) > MAX_RECORD_BYTES:
                raise ValueError(f"it has {len(data):,} bytes, and at most {MAX_RECORD_BYTES:,} are allowed")
            record = parse_record(data, self.log.redactor)
            if record is None:
                raise ValueError("it is not an object with a `type`")
            self._dispatch_record(record, now, rank)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
            self._budget.spend_bytes(COSTLY_BYTES, time.monotonic())
            if self._on_answers is None:
                excerpt = repr(self.log.redactor.cut_text(data.decode(errors="replace"), 200))
                reason = f"{error!r}): {excerpt}"
            else:  # also the error may quote it
                reason = f"{type(error).__name__}), which is not shown because it may contain an answer"
            self.log.log_line(f"the training process sent an invalid record ({reason}", "error")

    def _dispatch_record(self, record: dict[str, Any], now: float, rank: int) -> None:
        ts = record.pop("ts", None) or now
        for name in _ENVELOPE:
            record.pop(name, None)
        kind = record["type"]
        is_failure = kind == "result" and record.get("outcome") == "failed"
        if kind not in self._recorders or (rank != 0 and not is_failure):
            raise ValueError(f"unknown type {kind!r}")
        if kind in _COSTLY_RECORDS:
            self._budget.spend_bytes(COSTLY_BYTES, time.monotonic())
        if rank == 0:
            self._recorders[kind](record, ts)
        else:
            self.results.record_failure(rank, record)

    def _record_message(self, record: dict[str, Any], ts: float) -> None:
        message = validate_record(MessageRecord, record)
        self.log.log_message(message["line"], message.get("level", "info"), ts)

    def _record_answers(self, record: dict[str, Any], ts: float) -> None:
        """Pass the answers of a serving run on; only its own process sends them."""
        if self._on_answers is None:
            raise ValueError("the run answers no questions")
        self._on_answers(validate_record(AnswersRecord, record)["pieces"])

    def _record_event(self, record: dict[str, Any], ts: float) -> None:
        """Store a record that is an event as it is."""
        self._sink.enqueue_item(NewEvent.from_payload(record.pop("type"), ts, record))
