"""The event log: appended to under the run's row lock, read after a cursor.

Every writer raises `runs.event_seq` first and inserts after, in one transaction: the row lock makes the order of the
sequence numbers the order of the commits, so a reader that has seen `seq` never finds a smaller one later.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Select, Text, cast, select, text
from sqlalchemy.exc import DataError

from app.clock import timestamp as timestamp
from app.db import column
from app.events.models import RunEvent

MEASURED = ("metric", "eval")
"""The types of events that curves are made of."""
# `json.dumps` with arguments makes an encoder each time.
_as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Fenced(Exception):
    """The run belongs to somebody else by now (or has ended): write nothing more, kill the trainer."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event that has no `seq` yet. `data` is its payload as one line of JSON, an object."""

    type: str
    ts: datetime
    data: str
    measured: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    """The payload of metrics and evaluations, for who needs it once more; None where it has to be parsed again."""

    @classmethod
    def of(cls, kind: str, ts: float, payload: dict[str, Any]) -> "NewEvent":
        """From a payload of plain values, which nobody changes any more, and the time in seconds since 1970."""
        body = _as_json(payload)
        return cls(kind, datetime.fromtimestamp(ts, UTC), body, payload if kind in MEASURED else None)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a transaction has put events of an attempt: those behind its event number `number_before`."""

    number_before: int
    seq_before: int

    def seq_of(self, number: int) -> int:
        """The `seq` of the attempt's event of this number, which must be one that was stored just now."""
        return self.seq_before + number - self.number_before


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the trainer is, stored on the run together with the events that tell of it."""

    step: int
    epoch: float
    total_steps: int | None
    best_loss: float | None


# In one statement: with a COPY behind the update, a hundred events take a third longer.
# In the SELECT, the functions answer their rows in step; in FROM, two thousand events would take a quarter longer.
_STORE = text(
    """
    WITH reserved AS (
        UPDATE runs SET event_seq = event_seq + :n, src_hwm = src_hwm + :n,
            current_step = coalesce(:step, current_step), current_epoch = coalesce(:passes, current_epoch),
            total_steps = coalesce(:total, total_steps), best_loss = least(best_loss, :best)
        WHERE id = :id AND epoch = :epoch AND status IN ('initializing', 'running', 'checkpointing')
            AND src_hwm = :first - 1
        RETURNING event_seq - :n AS seq_before, attempt
    ), stored AS (
        INSERT INTO run_events (run_id, seq, type, attempt, ts, data)
        SELECT :id, seq_before + generate_series(1, :n), string_to_table(:types, chr(31)), attempt,
            cast(string_to_table(:moments, chr(31)) AS timestamptz), cast(string_to_table(:data, chr(31)) AS json)
        FROM reserved
    )
    SELECT seq_before FROM reserved
    """
)
# With the lock: a transaction of the same caller, who has heard nothing of it, may still be at work in Postgres.
_WHERE_STORED = text(
    "SELECT src_hwm FROM runs WHERE id = :id AND epoch = :epoch "
    "AND status IN ('initializing', 'running', 'checkpointing') FOR NO KEY UPDATE"
)
# Legal in JSON as they are, and the end of a line to many clients, httpx's `iter_lines` for one.
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


def append(
    connection: Connection,
    run_id: str,
    epoch: int,
    first: int,
    new: Sequence[NewEvent],
    progress: Progress | None = None,
) -> Stored | None:
    """Store the trainer's events number `first`, `first` + 1, … of this attempt, inside the caller's transaction.

    Sending again what was stored already, wholly or in part, stores each event once: so a caller that does not know
    whether its commit happened sends the same again, with more behind it if it likes. Answers where they are now;
    None when all of them were stored before.

    Raises:
        Fenced: another epoch, or the run has ended.
    """
    seq_before = _store(connection, run_id, epoch, first, new, progress)
    if seq_before is None:
        stored = connection.scalar(_WHERE_STORED, {"id": run_id, "epoch": epoch})
        if stored is None:
            raise Fenced(run_id)
        if stored < first - 1:
            raise RuntimeError(f"{run_id}: event {first} of the attempt came, {stored} are stored")
        new = new[stored - first + 1 :]
        if not new:
            return None
        first = stored + 1
        seq_before = _store(connection, run_id, epoch, first, new, progress)
        if seq_before is None:
            raise Fenced(run_id)
    return Stored(first - 1, seq_before)


def _store(
    connection: Connection, run_id: str, epoch: int, first: int, new: Sequence[NewEvent], progress: Progress | None
) -> int | None:
    """The last `seq` before them; None, and nothing is stored, where `first` is not the next that is awaited."""
    values = {
        "id": run_id,
        "epoch": epoch,
        "first": first,
        "n": len(new),
        "step": progress.step if progress else None,
        "passes": progress.epoch if progress else None,
        "total": progress.total_steps if progress else None,
        "best": progress.best_loss if progress else None,
        "types": column([event.type for event in new]),
        "moments": column([event.ts for event in new]),
        "data": column([event.data for event in new]),
    }
    seq_before: int | None = connection.scalar(_STORE, values)
    return seq_before


def is_refused_data(error: Exception) -> bool:
    """Whether Postgres refused what an event holds (and not the connection or the fence)."""
    return isinstance(error, DataError)


def read_after(run_id: str, after: int, limit: int) -> Select[int, str, datetime, str]:
    """The events behind the cursor `after`, at most `limit`: rows of seq, type, ts, data (text)."""
    return (
        select(RunEvent.seq, RunEvent.type, RunEvent.ts, cast(RunEvent.data, Text))
        .where(RunEvent.run_id == run_id, RunEvent.seq > after)
        .order_by(RunEvent.seq)
        .limit(limit)
    )


def payload(run_id: str, seq: int, ts: datetime, data: str) -> str:
    """The whole JSON object of an event, as it goes over the wire."""
    if not data.isascii():
        for mark, escape in _LINE_ENDS:
            data = data.replace(mark, escape)
    head = f'{{"run_id":"{run_id}","seq":{seq},"ts":"{timestamp(ts)}"'
    body = data.lstrip()[1:]
    return f"{head},{body}" if body.lstrip() != "}" else head + "}"
