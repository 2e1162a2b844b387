"""Event log of runs: appended under the run's row lock, read after a cursor.

Every writer first increments `runs.event_seq` and then inserts, in one transaction. The row lock makes sequence order
equal commit order, so a reader that has seen `seq` never finds a smaller one later.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DataError

from anneal.contracts.attempt.messages import MAX_RECORD_BYTES
from anneal.contracts.field_types import format_timestamp
from app.infra.db import join_column

MEASURED = ("metric", "eval")
"""Event types that are shown as curves."""
# `json.dumps` with arguments creates an encoder on each call.
_as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class LeaseFenced(Exception):
    """Raised when the worker no longer owns the run or the run has ended: write nothing more, kill the trainer."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """Event without a `seq`; `data` is its payload, a JSON object on one line."""

    type: str
    ts: datetime
    data: str
    measured: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    """Payload of a metric or evaluation, so that it need not be parsed again; None otherwise."""

    @classmethod
    def from_payload(cls, kind: str, ts: float, payload: dict[str, Any]) -> "NewEvent":
        """Create an event from a payload of plain values, not modified later, and a Unix time in seconds.

        Raises:
            ValueError: The payload is larger than a record may be.
        """
        body = _as_json(payload)
        if len(body) > MAX_RECORD_BYTES:
            raise ValueError(f"an event of {len(body):,} characters is larger than the limit of {MAX_RECORD_BYTES:,}")
        return cls(kind, datetime.fromtimestamp(ts, UTC), body, payload if kind in MEASURED else None)


@dataclass(frozen=True, slots=True)
class Stored:
    """Position of the attempt's events after number `number_before` that a transaction has stored."""

    number_before: int
    seq_before: int

    def seq_of(self, number: int) -> int:
        """Return the `seq` of the attempt's event with this number; it must be one that was just stored."""
        return self.seq_before + number - self.number_before


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the trainer, stored on the run in the same transaction as the events that report it."""

    step: int
    epoch: float
    total_steps: int | None
    best_loss: float | None


# One statement: a COPY after the update takes a third longer for 100 events.
# In the SELECT list the set-returning functions advance together; in FROM, 2,000 events take a quarter longer.
_STORE = text(
    """
    WITH reserved AS (
        UPDATE runs SET event_seq = event_seq + :n, attempt_event_count = attempt_event_count + :n,
            current_step = coalesce(:step, current_step), current_epoch = coalesce(:epoch, current_epoch),
            total_steps = coalesce(:total, total_steps), best_loss = least(best_loss, :best)
        WHERE id = :id AND lease_epoch = :lease_epoch AND status IN ('initializing', 'running', 'checkpointing')
            AND attempt_event_count = :first - 1
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
_STORE_LINES = text(
    """
    WITH reserved AS (
        UPDATE runs SET event_seq = event_seq + :n
        WHERE lease_epoch = :lease_epoch AND id = :id AND status IN ('initializing', 'running', 'checkpointing')
        RETURNING event_seq - :n AS seq_before, attempt
    ), lines AS (
        INSERT INTO run_events (run_id, seq, type, attempt, ts, data)
        SELECT :id, seq_before + generate_series(1, :n), 'log', attempt,
            cast(string_to_table(:moments, chr(31)) AS timestamptz), cast(string_to_table(:data, chr(31)) AS json)
        FROM reserved
    )
    SELECT seq_before FROM reserved
    """
)
# With a lock: an earlier transaction of the same caller, whose result was lost, may still be running.
_WHERE_STORED = text(
    "SELECT attempt_event_count FROM runs WHERE id = :id AND lease_epoch = :lease_epoch "
    "AND status IN ('initializing', 'running', 'checkpointing') FOR NO KEY UPDATE"
)
READ_AFTER = text(
    """
    SELECT seq, type, ts, data::text FROM (
        SELECT *, coalesce(sum(pg_column_size(data)) OVER before, 0) AS bytes_before
        FROM (
            SELECT seq, type, ts, data FROM run_events WHERE run_id = :run_id AND seq > :after
            ORDER BY seq LIMIT :limit
        ) AS next
        WINDOW before AS (ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
    ) AS sized
    WHERE bytes_before < :most_bytes ORDER BY seq
    """
)
"""Select at most `limit` events of a run after a cursor: rows of seq, type, ts, data (text).

The last row is the one with which the data reaches `most_bytes`, so there is at least one row if there is any. The
column is stored uncompressed, so its size is known without reading the value.
"""
# Valid unescaped in JSON, but line ends to many clients, such as httpx's `iter_lines`.
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


def append_events(
    connection: Connection,
    run_id: str,
    lease_epoch: int,
    first: int,
    new: Sequence[NewEvent],
    progress: Progress | None = None,
) -> Stored | None:
    """Store the trainer's events number `first`, `first` + 1, … of this attempt, inside the caller's transaction.

    Idempotent: events that are already stored, all or some of them, are stored once. A caller that does not know
    whether its commit succeeded can send the same events again, followed by more. Returns the position of the stored
    events, or None if all of them were stored before.

    Raises:
        LeaseFenced: The run has another lease epoch, or it has ended.
    """
    seq_before = _store_events(connection, run_id, lease_epoch, first, new, progress)
    if seq_before is None:
        stored = connection.scalar(_WHERE_STORED, {"id": run_id, "lease_epoch": lease_epoch})
        if stored is None:
            raise LeaseFenced(run_id)
        if stored < first - 1:
            raise RuntimeError(f"{run_id}: received event {first} of the attempt, but only {stored} are stored")
        new = new[stored - first + 1 :]
        if not new:
            return None
        first = stored + 1
        seq_before = _store_events(connection, run_id, lease_epoch, first, new, progress)
        if seq_before is None:
            raise LeaseFenced(run_id)
    return Stored(first - 1, seq_before)


def append_lines(connection: Connection, run_id: str, lease_epoch: int, new: Sequence[NewEvent]) -> None:
    """Store log lines of another worker than the one that owns the run, inside the caller's transaction.

    They do not count as events of the attempt, whose numbers are the owner's. So a caller that does not know whether
    its commit succeeded must not send them again.

    Raises:
        LeaseFenced: The run has another lease epoch, or it has ended.
    """
    values = {
        "id": run_id,
        "lease_epoch": lease_epoch,
        "n": len(new),
        "moments": join_column([event.ts for event in new]),
        "data": join_column([event.data for event in new]),
    }
    if connection.scalar(_STORE_LINES, values) is None:
        raise LeaseFenced(run_id)


def _store_events(
    connection: Connection,
    run_id: str,
    lease_epoch: int,
    first: int,
    new: Sequence[NewEvent],
    progress: Progress | None,
) -> int | None:
    """Store the events and return the `seq` before them; store nothing and return None if `first` is not next."""
    values = {
        "id": run_id,
        "lease_epoch": lease_epoch,
        "first": first,
        "n": len(new),
        "step": progress.step if progress else None,
        "epoch": progress.epoch if progress else None,
        "total": progress.total_steps if progress else None,
        "best": progress.best_loss if progress else None,
        "types": join_column([event.type for event in new]),
        "moments": join_column([event.ts for event in new]),
        "data": join_column([event.data for event in new]),
    }
    seq_before: int | None = connection.scalar(_STORE, values)
    return seq_before


def is_refused_data(error: Exception) -> bool:
    """Return True if Postgres rejected the content of an event (not the connection or the fence)."""
    return isinstance(error, DataError)


def event_json(run_id: str, seq: int, ts: datetime, data: str) -> str:
    """Build the complete JSON object of an event in its wire format."""
    if not data.isascii():
        for mark, escape in _LINE_ENDS:
            data = data.replace(mark, escape)
    head = f'{{"run_id":"{run_id}","seq":{seq},"ts":"{format_timestamp(ts)}"'
    body = data.lstrip()[1:]
    return f"{head},{body}" if body.lstrip() != "}" else head + "}"
