"""From a training process into the event log: everything it says, in its order, stored once."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable, select, update
from sqlalchemy.exc import SQLAlchemyError

from app.checkpoints import retention
from app.checkpoints.models import Checkpoint
from app.events import log as event_log
from app.events.log import Fenced, NewEvent, Progress
from app.ids import new_id
from app.runs import lifecycle
from app.runs.models import LIVE, Run
from worker.channel import Source
from worker.host import Host
from worker.job import remove_folders
from worker.lease import Lease
from worker.lines import LogLines, clean_record

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.1
_MOST_AT_ONCE = 2000
_MOST_WAITING = 50_000
"""Events kept while Postgres is away; with more than this the trainer has to wait too."""
_TAIL_LINES = 50
_PLAIN_EVENTS = {"eval", "progress", "sample"}

T = TypeVar("T")


class LeaseLost(Exception):
    """Postgres was not reached in time: the run is to be taken for somebody else's, and nothing can be written."""


@dataclass(frozen=True)
class Step:
    """A change of the run that has its place among the events: what is before it is stored before it."""

    apply: Callable[[Connection], None]
    event: NewEvent | None = None


class Pump:
    """Takes what the trainer says and stores it in transactions of up to 100 ms each."""

    def __init__(self, host: Host, run: Any, lease: Lease) -> None:
        self.result: dict[str, Any] | None = None
        """What the trainer said last: outcome, error, output."""
        self.phase = "loading"
        self.has_begun = False
        """Whether the trainer has reached its first step, so that there is something to save."""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines it printed."""
        self._host = host
        self._run = run
        self._lease = lease
        self._start_step = 0
        self._best_loss: float | None = None
        self._lines = LogLines()
        self._waiting: deque[NewEvent | Step] = deque()
        self._stored = 0
        self._progress: Progress | None = None
        self._status = "initializing"
        self._retired: list[tuple[int, str]] = []
        self._flush_at = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the trainer has to wait until Postgres has taken some of it."""
        return len(self._waiting) >= _MOST_WAITING

    def take(self, pieces: Sequence[tuple[Source, bytes]]) -> None:
        """Sort what came from the trainer; nothing is stored yet."""
        now = time.time()
        for source, data in pieces:
            if source == "report":
                self._take_record(data, now)
            else:
                self._add_lines(self._lines.feed(source, data, time.monotonic()), now)

    def say(self, line: str, level: str = "info") -> None:
        """A line of our own in the run's log."""
        self._add_lines([{"line": line, "stream": "anneal", "level": level}], time.time())

    def start_from(self, step: int, best_loss: float | None) -> None:
        """Where the attempt takes up the run; what lies beyond rolls back."""
        self._start_step, self._best_loss = step, best_loss

    def end_of_output(self) -> None:
        """Nothing more will come: what is left of a line is a line."""
        self._add_lines(self._lines.flush(), time.time())

    def flush_when_due(self) -> None:
        """Store what waits, about ten times a second; when Postgres is away, keep it and try again."""
        if time.monotonic() < self._flush_at:
            return
        try:
            self.flush()
            self._flush_at = time.monotonic() + FLUSH_SECONDS
        except SQLAlchemyError as error:
            log.info("%s: %d events wait for the database: %s", self._run.id, len(self._waiting), error)
            self._flush_at = time.monotonic() + 5 * FLUSH_SECONDS

    def flush_all(self) -> None:
        """Store everything that waits, for as long as the lease allows.

        Raises:
            LeaseLost, Fenced: nothing more may be written.
        """
        self.persist(self.flush)

    def persist(self, write: Callable[[], T]) -> T:
        """Do what needs the database until it succeeds or the lease has run out.

        Raises:
            LeaseLost, Fenced: nothing more may be written.
        """
        while True:
            try:
                return write()
            except SQLAlchemyError as error:
                if self._lease.fenced:
                    raise Fenced(self._run.id) from error
                if self._lease.expired:
                    raise LeaseLost(self._run.id) from error
                log.info("%s: the database is away, trying again: %s", self._run.id, error)
                time.sleep(FLUSH_SECONDS * 2)

    def flush(self) -> None:
        """Store what waits: events in batches, each change of the run in a transaction of its own."""
        while self._waiting:
            if isinstance(self._waiting[0], Step):
                self._apply(self._waiting[0])
            else:
                self._store()
            self._host.wake(self._run.id)

    def _store(self) -> None:
        batch: list[NewEvent] = []
        for item in self._waiting:
            if isinstance(item, Step) or len(batch) == _MOST_AT_ONCE:
                break
            batch.append(item)
        try:
            self._append(batch)
        except SQLAlchemyError as error:
            if not event_log.is_refused_data(error):
                raise
            self._store_apart(batch, error)
        for _ in batch:
            self._waiting.popleft()

    def _store_apart(self, batch: list[NewEvent], error: Exception) -> None:
        """Postgres refuses something in the batch: halve it until that one event is alone, and say so in its place."""
        if len(batch) > 1:
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                try:
                    self._append(half)
                except SQLAlchemyError as cause:
                    if not event_log.is_refused_data(cause):
                        raise
                    self._store_apart(half, cause)
            return
        reason = str(error).splitlines()[0][:300].replace("\x00", "")
        line = {"line": f"an event of type {batch[0].type} could not be stored: {reason}", "stream": "anneal"}
        self._append([NewEvent.of("log", batch[0].ts.timestamp(), clean_record({**line, "level": "error"}))])

    def _append(self, batch: list[NewEvent], then: Callable[[Connection], None] | None = None) -> None:
        with self._host.engine.begin() as connection:
            event_log.append(connection, self._run.id, self._run.epoch, self._stored + 1, batch, self._progress)
            if then:
                then(connection)
        self._stored += len(batch)

    def _apply(self, step: Step) -> None:
        if step.event is not None:
            self._append([step.event], step.apply)
        else:
            with self._host.engine.begin() as connection:
                step.apply(connection)
        self._waiting.popleft()
        if self._retired:
            remove_folders(self._host, self._run.id, self._retired)
            self._retired = []

    def _add_lines(self, lines: list[dict[str, Any]], now: float) -> None:
        for line in lines:
            self.tail.append(line["line"])
            self._waiting.append(NewEvent.of("log", now, line))

    def _take_record(self, data: bytes, now: float) -> None:
        try:
            record = clean_record(json.loads(data))
            kind, ts = record.pop("type"), float(record.pop("ts", None) or now)
        except (ValueError, KeyError, AttributeError, TypeError):
            self.say(f"the training process sent a record that cannot be read: {data[:200]!r}", "error")
            return
        take = {
            "message": self._take_message,
            "config": self._take_config,
            "metric": self._take_metric,
            "phase": self._take_phase,
            "checkpoint": self._take_checkpoint,
            "result": self._take_result,
        }.get(kind)
        if take:
            take(record, ts)
        elif kind in _PLAIN_EVENTS:
            self._waiting.append(NewEvent.of(kind, ts, record))
        else:
            self.say(f"the training process sent a record of the unknown type {kind!r}", "error")

    def _take_message(self, record: dict[str, Any], ts: float) -> None:
        line = {"line": str(record.get("line", "")), "stream": "anneal", "level": record.get("level", "info")}
        self._waiting.append(NewEvent.of("log", ts, line))

    def _take_config(self, record: dict[str, Any], ts: float) -> None:
        def keep(connection: Connection) -> None:
            connection.execute(
                update(Run)
                .where(Run.id == self._run.id, Run.epoch == self._run.epoch)
                .values(effective_config=record.get("effective"))
            )

        self._waiting.append(Step(keep, NewEvent.of("config", ts, record)))

    def _take_metric(self, record: dict[str, Any], ts: float) -> None:
        loss = record.get("loss")
        if isinstance(loss, float | int) and (self._best_loss is None or loss < self._best_loss):
            self._best_loss = float(loss)
        total = record.pop("total_steps", None)
        self._progress = Progress(int(record["step"]), float(record.get("epoch") or 0), total, self._best_loss)
        self._waiting.append(NewEvent.of("metric", ts, record))

    def _take_result(self, record: dict[str, Any], _ts: float) -> None:
        self.result = record

    def _take_phase(self, record: dict[str, Any], ts: float) -> None:
        self.phase = record["name"]
        run_id, epoch = self._run.id, self._run.epoch
        progress = {"phase": self.phase, "done": None, "total": None, "message": self.phase}
        self._waiting.append(NewEvent.of("progress", ts, progress))
        if self.phase == "training" and not self.has_begun:
            self.has_begun = True
            start = int(record.get("start_step") or self._start_step)
            self._move(lifecycle.begin(run_id, epoch, start, record.get("total_steps"), self._best_loss), "running")
        elif self.phase == "saving" and self._status == "running":
            self._move(lifecycle.saving(run_id, epoch), "checkpointing")
        elif self.phase != "saving" and self._status == "checkpointing":
            self._move(lifecycle.saved(run_id, epoch), "running")

    def _move(self, statement: Executable, target: str) -> None:
        def apply(connection: Connection) -> None:
            if connection.execute(statement).one_or_none() is None:
                now = connection.execute(select(Run.epoch, Run.status).where(Run.id == self._run.id)).one_or_none()
                # The commit of an earlier try may have happened although its answer never came.
                if now is None or now.epoch != self._run.epoch or now.status != target:
                    raise Fenced(self._run.id)

        self._status = target
        self._waiting.append(Step(apply))

    def _take_checkpoint(self, record: dict[str, Any], ts: float) -> None:
        checkpoint_id = new_id("ckpt")
        run = self._run
        row = {
            "id": checkpoint_id,
            "run_id": run.id,
            "attempt": run.attempt,
            "name": record["name"],
            "step": record["step"],
            "epoch": record.get("epoch") or 0.0,
            "kind": record["kind"],
            "bytes": record["bytes"],
            "manifest_sha256": record["manifest_sha256"],
            "metrics": {**(record.get("metrics") or {}), "best_loss": self._best_loss},
        }

        def keep(connection: Connection) -> None:
            if connection.scalar(select(Checkpoint.id).where(Checkpoint.id == checkpoint_id)):
                return
            connection.execute(Checkpoint.__table__.insert().values(row))  # type: ignore[attr-defined]
            # A run that gets somewhere between two losses may be lost any number of times.
            connection.execute(
                update(Run)
                .where(Run.id == run.id, Run.epoch == run.epoch, Run.status.in_(LIVE))
                .values(lost_count=0, checkpoint_step=row["step"])
            )
            keep_last = run.config.get("save_total_limit")
            if keep_last:
                retired = connection.execute(retention.retire(run.id, keep_last)).all()
                self._retired = [(attempt, name) for attempt, name in retired]

        total = self._progress.total_steps if self._progress else None
        self._progress = Progress(row["step"], row["epoch"], total, self._best_loss)
        told = {"checkpoint_id": checkpoint_id, "step": row["step"], "kind": row["kind"], "bytes": row["bytes"]}
        self._waiting.append(Step(keep, NewEvent.of("checkpoint", ts, told)))
