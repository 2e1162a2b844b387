"""A state transition of a run as one statement: guarded UPDATE, events, end of the attempt, release of the devices.

`machine.py`, the only user of this module, defines the transitions and their guards.
"""

from typing import Any

from sqlalchemy import (
    ColumnElement,
    Executable,
    Integer,
    Text,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    literal,
    null,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import JSON, JSONB, insert
from sqlalchemy.sql.selectable import CTE

from anneal.contracts.run_status import TERMINAL
from app.infra.db import interval_seconds
from app.tables.actions import RunAction
from app.tables.events import RunEvent
from app.tables.parts import RunPart
from app.tables.runs import Attempt, Run, RunEvalDataset
from app.tables.workers import Device

runs: Any = Run.__table__

eval_datasets: Any = RunEvalDataset.__table__

attempts: Any = Attempt.__table__

devices: Any = Device.__table__

actions: Any = RunAction.__table__

run_parts: Any = RunPart.__table__

events: Any = RunEvent.__table__


EVENT_COLUMNS = ["run_id", "seq", "type", "attempt", "ts", "data"]


def as_json(**fields: Any) -> ColumnElement[Any]:
    """Return a JSON object of column expressions."""
    pairs = [part for name, value in fields.items() for part in (text(f"'{name}'"), value)]
    return cast(func.json_build_object(*pairs), JSON)


def statement(
    picked: CTE, target: ColumnElement[Any], reason: str, outcome: str | None = None, **values: Any
) -> Executable:
    """Return the transition as one statement that yields the changed rows."""
    moved, parts = move(picked, target, literal(reason), outcome=outcome, **values)
    return select(moved).add_cte(*parts)


def move(
    picked: CTE, target: ColumnElement[Any], reason: Any, outcome: str | None = None, **values: Any
) -> tuple[CTE, list[CTE]]:
    """Return the guarded UPDATE as a CTE, and the statements that belong to it."""
    changed = target != runs.c.status
    ends = and_(changed, target.in_(TERMINAL))
    fails = and_(changed, target == "failed")
    leaves = target.in_((*TERMINAL, "pending"))
    values.setdefault("lease_owner", case((leaves, None), else_=runs.c.lease_owner))
    values.setdefault("preempted_for", case((leaves, None), else_=runs.c.preempted_for))
    values.setdefault("lease_expires_at", case((leaves, None), else_=runs.c.lease_expires_at))
    moved = (
        update(runs)
        .where(runs.c.id == picked.c.id)
        .values(
            **values,
            status=target,
            pending_reason=case((target == "pending", runs.c.pending_reason), else_=null()),
            finished_at=case((ends, func.now()), else_=runs.c.finished_at),
            event_seq=runs.c.event_seq + cast(changed, Integer) + cast(ends, Integer) + cast(fails, Integer),
        )
        .returning(*runs.c, picked.c.from_status)
        .cte("moved")
    )
    return moved, [_logged(moved, reason), _closed(moved, outcome), _released(moved)]


def claimed(picked: CTE, worker_id: str, lease_seconds: float) -> tuple[CTE, list[CTE]]:
    """Return the claim of a picked run, and the statements that belong to it.

    It is a `move` without what a claim does not need: PostgreSQL would take longer to plan than to execute that.
    """
    moved = (
        update(runs)
        .where(runs.c.id == picked.c.id)
        .values(
            status="initializing",
            pending_reason=null(),
            event_seq=runs.c.event_seq + 1,
            lease_epoch=runs.c.lease_epoch + 1,
            attempt=runs.c.attempt + 1,
            attempt_event_count=0,
            lease_owner=worker_id,
            worker_id=worker_id,
            lease_expires_at=func.clock_timestamp() + interval_seconds(lease_seconds),
            started_at=func.coalesce(runs.c.started_at, func.now()),
        )
        .returning(*runs.c, picked.c.from_status)
        .cte("moved")
    )
    row, reason = moved.c, func.concat("claimed by ", worker_id)
    status = as_json(**{"from": row.from_status, "to": row.status, "reason": reason, "attempt": row.attempt})
    event = select(row.id, row.event_seq, literal("status"), row.attempt, func.clock_timestamp(), status)
    logged = insert(events).from_select(EVENT_COLUMNS, event).returning(events.c.seq).cte("logged")
    opened = (
        insert(attempts)
        .from_select(
            ["run_id", "attempt", "lease_epoch", "worker_id", "device"],
            select(row.id, row.attempt, row.lease_epoch, literal(worker_id), bindparam("claimed_device", type_=Text)),
        )
        .returning(attempts.c.attempt)
        .cte("opened")
    )
    return moved, [logged, opened]


def extra_eval_datasets(moved: CTE) -> ColumnElement[Any]:
    """Return the ids of the extra evaluation datasets of a claimed run by name, as a column; null without any."""
    named = func.jsonb_object_agg(eval_datasets.c.name, eval_datasets.c.dataset_id, type_=JSONB)
    return select(named).where(eval_datasets.c.run_id == moved.c.id).scalar_subquery().label("extra_eval_datasets")


def _logged(moved: CTE, reason: Any) -> CTE:
    """Insert the events `error`, `status` and `end`, in this order, as far as the move requires them."""
    row = moved.c
    now = func.clock_timestamp()
    has_moved = row.status != row.from_status
    has_ended = and_(has_moved, row.status.in_(TERMINAL))
    status = {"from": row.from_status, "to": row.status, "reason": reason, "attempt": row.attempt}
    error = {"code": row.error_code, "message": row.error_message}
    new_events = union_all(
        select(row.id, row.event_seq - 2, literal("error"), row.attempt, now, as_json(**error)).where(
            has_moved, row.status == "failed"
        ),
        select(
            row.id,
            row.event_seq - cast(has_ended, Integer),
            literal("status"),
            row.attempt,
            now,
            as_json(**status),
        ).where(has_moved),
        select(row.id, row.event_seq, literal("end"), row.attempt, now, as_json(status=row.status)).where(has_ended),
    )
    return insert(events).from_select(EVENT_COLUMNS, new_events).returning(events.c.seq).cte("logged")


def _closed(moved: CTE, outcome: str | None) -> CTE:
    """Close the attempt that the move ended."""
    return (
        update(attempts)
        .where(
            attempts.c.run_id == moved.c.id,
            attempts.c.attempt == moved.c.attempt,
            attempts.c.ended_at.is_(None),
            moved.c.lease_owner.is_(None),
        )
        .values(
            ended_at=func.clock_timestamp(),
            outcome=case((moved.c.status == "pending", outcome or "requeued"), else_=moved.c.status),
        )
        .returning(attempts.c.attempt)
        .cte("closed")
    )


def _released(moved: CTE) -> CTE:
    """Free the devices of a run that no worker owns any more, but those of a part that may still have processes."""
    is_open = exists().where(
        run_parts.c.run_id == devices.c.run_id,
        run_parts.c.lease_epoch == devices.c.lease_epoch,
        run_parts.c.worker_id == devices.c.worker_id,
        run_parts.c.ended_at.is_(None),
    )
    return (
        update(devices)
        .where(devices.c.run_id == moved.c.id, moved.c.lease_owner.is_(None), ~is_open)
        .values(run_id=None, lease_epoch=None)
        .returning(devices.c.index)
        .cte("released")
    )
