"""Statements about the parts of a run on several hosts: each has a lease, fenced with the lease epoch of its run.

The lead has claimed the run and is the only one that writes transitions, and events other than log lines; its own part
has the run's lease. The workers of the others renew theirs, and free the devices when no process is left.
"""

from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Executable, and_, delete, exists, func, literal, null, or_, select, text, update
from sqlalchemy.dialects.postgresql import JSONB

from app.infra.db import interval_seconds
from app.tables.parts import RunPart
from app.tables.runs import Run
from app.tables.workers import Device

_KEPT_DAYS = 1

_parts: Any = RunPart.__table__
_runs: Any = Run.__table__
_devices: Any = Device.__table__


def is_over() -> ColumnElement[bool]:
    """Return the condition that a part has ended, with its own worker or by `reap`."""
    has_ended: ColumnElement[bool] = _parts.c.ended_at.is_not(None)
    return has_ended


def is_up_long_enough(lease_seconds: float) -> ColumnElement[bool]:
    """Return the condition that PostgreSQL has run for a lease, so that workers have been able to renew theirs.

    A start that is still to come says that the clock was set back since.
    """
    started = func.pg_postmaster_start_time()
    now = func.clock_timestamp()
    return or_(started < now - interval_seconds(lease_seconds), started > now)


def run_of(run_id: str, lease_epoch: int) -> Executable:
    """Select the run of a part; no row if it has another lease epoch. The row is as that of a claim."""
    own = [null().label(name) for name in ("device_indexes", "members", "extra_eval_datasets")]
    return select(_runs, *own).where(_runs.c.id == run_id, _runs.c.lease_epoch == lease_epoch)


def is_live(run_id: str, lease_epoch: int) -> Executable:
    """Select whether the attempt of a part still has its lead, which may be writing until then."""
    return select(
        exists().where(_runs.c.id == run_id, _runs.c.lease_epoch == lease_epoch, _runs.c.lease_owner.is_not(None))
    )


def job_of(run_id: str, lease_epoch: int, part: int) -> Executable:
    """Select the job of the lead of a part; null if it is in a folder that they share."""
    return select(_parts.c.job).where(_this(run_id, lease_epoch, part))


def of_worker(worker_id: str) -> Executable:
    """Select the parts that a worker trains or is to train, with what it needs for that."""
    return select(_parts).where(_parts.c.worker_id == worker_id, _parts.c.ended_at.is_(None))


def announce(run_id: str, lease_epoch: int, meeting: str, job: dict[str, Any] | None = None) -> Executable:
    """Let the workers of the other parts start their processes, which meet at this address.

    `job` is that of the lead, for workers that share no folder with it.
    """
    return (
        update(_parts)
        .where(_parts.c.run_id == run_id, _parts.c.lease_epoch == lease_epoch)
        .values(meeting=meeting, job=null() if job is None else literal(job, JSONB))
        .returning(_parts.c.part)
    )


def renew(
    run_id: str, lease_epoch: int, part: int, lease_seconds: float, activity: dict[str, Any] | None = None
) -> Executable:
    """Renew the lease of a part, store what its processes do, and return where the ranks meet.

    No row: the attempt has ended, or the run belongs to another one. Then no process of the part may live.
    """
    return (
        update(_parts)
        .where(
            _this(run_id, lease_epoch, part),
            _parts.c.ended_at.is_(None),
            _runs.c.id == _parts.c.run_id,
            _runs.c.lease_epoch == _parts.c.lease_epoch,
            _runs.c.lease_owner.is_not(None),
        )
        .values(
            lease_expires_at=func.clock_timestamp() + interval_seconds(lease_seconds),
            activity=null() if activity is None else literal(activity, JSONB),
        )
        .returning(_parts.c.meeting)
    )


def leave(run_id: str, lease_epoch: int, part: int) -> Executable:
    """Record that the worker of a part is shutting down: the lead lets the run save and releases it."""
    return update(_parts).where(_this(run_id, lease_epoch, part)).values(is_leaving=True)


def end(
    run_id: str, lease_epoch: int, part: int, worker_id: str, outcome: dict[str, Any]
) -> tuple[Executable, Executable]:
    """End a part of which no process is left, and free its devices."""
    ended = (
        update(_parts)
        .where(_this(run_id, lease_epoch, part), _parts.c.ended_at.is_(None))
        .values(ended_at=func.clock_timestamp(), outcome=literal(outcome, JSONB))
    )
    held = and_(_devices.c.worker_id == worker_id, _devices.c.run_id == run_id, _devices.c.lease_epoch == lease_epoch)
    return ended, update(_devices).where(held).values(run_id=None, lease_epoch=None)


@cache
def reap(lease_seconds: float) -> Executable:
    """End the parts whose lease has expired and free their devices, unless Postgres has only just started.

    As of a run, the processes are dead: their own timers end them long before.
    """
    return _lost(and_(_parts.c.lease_expires_at < func.now(), is_up_long_enough(lease_seconds)))


def reap_dead(worker_ids: list[str]) -> Executable:
    """End the parts of workers whose process is known to be gone, and free their devices."""
    return _lost(_parts.c.worker_id.in_(worker_ids))


def forget() -> Executable:
    """Delete parts that ended long ago; the reports of their attempts stay."""
    return delete(_parts).where(_parts.c.ended_at < func.now() - text(f"interval '{_KEPT_DAYS} day'"))


def _this(run_id: str, lease_epoch: int, part: int) -> ColumnElement[bool]:
    return and_(_parts.c.run_id == run_id, _parts.c.lease_epoch == lease_epoch, _parts.c.part == part)


def _lost(where: ColumnElement[bool]) -> Executable:
    """End open parts; the rows are run and worker of each. One that another transaction holds is left for later."""
    open_parts = (
        select(_parts.c.run_id, _parts.c.lease_epoch, _parts.c.part)
        .where(where, _parts.c.ended_at.is_(None))
        .with_for_update(skip_locked=True)
        .cte("open_parts")
    )
    ended = (
        update(_parts)
        .where(
            _parts.c.run_id == open_parts.c.run_id,
            _parts.c.lease_epoch == open_parts.c.lease_epoch,
            _parts.c.part == open_parts.c.part,
        )
        .values(ended_at=func.clock_timestamp())
        .returning(_parts.c.run_id, _parts.c.lease_epoch, _parts.c.worker_id)
        .cte("ended")
    )
    held = exists().where(
        ended.c.run_id == _devices.c.run_id,
        ended.c.lease_epoch == _devices.c.lease_epoch,
        ended.c.worker_id == _devices.c.worker_id,
    )
    freed = update(_devices).where(held).values(run_id=None, lease_epoch=None).returning(_devices.c.index).cte("freed")
    return select(ended.c.run_id, ended.c.worker_id).add_cte(freed)
