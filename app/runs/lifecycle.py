"""The state machine of a run, and the only writer of `runs.status`.

    pending ──claim──▶ initializing ──begin──▶ running ◀──saved── checkpointing
     ▲  │                   │                   │  └────saving───────▲
     │  └─request_stop─▶ cancelled              │
     └──── hand_back · retry · repair · reap ◀──┤   (cancelled when a stop was asked, failed past max_restarts)
                                                └──▶ complete · fail · cancel

Each function returns one SQLAlchemy statement that async and sync sessions both execute: a guarded UPDATE, the
events that tell of it (`status`, before an end also `error`, and `end`), the attempt's end and the devices' release
together. Its rows are the runs that moved, with the columns of `Run` and `from_status`; no row means that the caller
is stale and must yield.
"""

from typing import Any

from sqlalchemy import (
    ColumnElement,
    Executable,
    Integer,
    Select,
    and_,
    case,
    cast,
    func,
    literal,
    null,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import aggregate_order_by, insert
from sqlalchemy.sql.selectable import CTE

from app.runs.models import LIVE, TERMINAL
from app.runs.transitions import (
    EVENT_COLUMNS,
    actions,
    as_json,
    attempts,
    devices,
    events,
    move,
    runs,
    seconds,
    statement,
)

_LEAST_PAUSE = 1.0
_MOST_DOUBLINGS = 6


def create(values: dict[str, Any], reason: str = "created") -> Executable:
    """Insert a pending run and its first event; no row when there is one with that id or idempotency key."""
    new = insert(runs).values(**values, status="pending", event_seq=1)
    made = new.on_conflict_do_nothing().returning(*runs.c).cte("made")
    first = select(
        made.c.id,
        literal(1),
        literal("status"),
        literal(0),
        func.clock_timestamp(),
        as_json(**{"from": null(), "to": made.c.status, "reason": literal(reason), "attempt": literal(0)}),
    )
    logged = insert(events).from_select(EVENT_COLUMNS, first).returning(events.c.seq).cte("logged")
    return select(made).add_cte(logged)


def claim(worker_id: str, backends: list[str], lease_seconds: float, kind: str, memory_mb: int | None) -> Executable:
    """Take the best pending run that fits the devices that are free on this worker, and those devices.

    The row adds `device_indexes`. A hint's run does not matter: priority does, then age.
    """
    # Plain FOR UPDATE: a second thread of this worker waits and then sees what is left, instead of nothing.
    free = (
        select(devices.c.index)
        .where(devices.c.worker_id == worker_id, devices.c.run_id.is_(None))
        .order_by(devices.c.index)
        .with_for_update()
        .cte("free")
    )
    room = select(func.count()).select_from(free).scalar_subquery()
    picked = (
        select(runs.c.id, runs.c.status.label("from_status"))
        .where(
            runs.c.status == "pending",
            runs.c.stop_requested_at.is_(None),
            runs.c.not_before <= func.clock_timestamp(),
            runs.c.backend.in_(backends),
            runs.c.devices_needed <= room,
            func.coalesce(runs.c.requirements["kind"].astext, kind) == kind,
            func.coalesce(cast(runs.c.requirements["memory_mb"].astext, Integer), 0) <= (memory_mb or 0),
        )
        .order_by(runs.c.priority.desc(), runs.c.id)
        .limit(1)
        .with_for_update(of=runs, skip_locked=True)
        .cte("picked")
    )
    moved, parts = move(
        picked,
        literal("initializing"),
        reason=func.concat("claimed by ", worker_id),
        epoch=runs.c.epoch + 1,
        attempt=runs.c.attempt + 1,
        src_hwm=0,
        lease_owner=worker_id,
        worker_id=worker_id,
        lease_expires_at=func.clock_timestamp() + seconds(lease_seconds),
        started_at=func.coalesce(runs.c.started_at, func.now()),
    )
    chosen = select(free.c.index).order_by(free.c.index).limit(select(moved.c.devices_needed).scalar_subquery())
    taken = (
        update(devices)
        .where(devices.c.worker_id == moved.c.lease_owner, devices.c.index.in_(chosen))
        .values(run_id=moved.c.id, run_epoch=moved.c.epoch)
        .returning(devices.c.index)
        .cte("taken")
    )
    opened = (
        insert(attempts)
        .from_select(
            ["run_id", "attempt", "epoch", "worker_id"],
            select(moved.c.id, moved.c.attempt, moved.c.epoch, literal(worker_id)),
        )
        .returning(attempts.c.attempt)
        .cte("opened")
    )
    indexes = select(func.array_agg(taken.c.index)).scalar_subquery().label("device_indexes")
    return select(moved, indexes).add_cte(*parts, opened)


def begin(
    run_id: str, epoch: int, start_step: int, start_epoch: float, total_steps: int | None, best_loss: float | None
) -> Executable:
    """The first optimizer step is about to run; what an earlier attempt had reached beyond it rolls back."""
    progress: dict[str, Any] = {
        "current_step": start_step,
        "current_epoch": start_epoch,
        "best_loss": best_loss,
        "total_steps": total_steps,
    }
    where = and_(runs.c.id == run_id, runs.c.epoch == epoch, runs.c.status == "initializing")
    moved, parts = move(_pick(where), literal("running"), literal("training"), **progress)
    started = (
        update(attempts)
        .where(attempts.c.run_id == moved.c.id, attempts.c.attempt == moved.c.attempt)
        .values(start_step=start_step)
        .returning(attempts.c.attempt)
        .cte("started")
    )
    # The attempt has not ended, so `closed` touches no row that `started` does.
    return select(moved).add_cte(*parts, started)


def saving(run_id: str, epoch: int) -> Executable:
    """A checkpoint is being written."""
    return _guarded(run_id, epoch, ("running",), "checkpointing", "saving a checkpoint")


def saved(run_id: str, epoch: int) -> Executable:
    """The checkpoint is written, training goes on."""
    return _guarded(run_id, epoch, ("checkpointing",), "running", "training")


def complete(run_id: str, epoch: int, output_attempt: int | None, reason: str) -> Executable:
    """Training is over and its output lies in the attempt's folder."""
    return _guarded(run_id, epoch, LIVE, "completed", reason, output_attempt=output_attempt)


def fail(run_id: str, epoch: int, code: str, message: str, output_attempt: int | None = None) -> Executable:
    """The run ends with a classified error; one that met its time limit has an output all the same."""
    error = {"error_code": code, "error_message": message}
    return _guarded(run_id, epoch, LIVE, "failed", code, output_attempt=output_attempt, **error)


def cancel(run_id: str, epoch: int) -> Executable:
    """The run ends because a stop was asked for; without such a request the row refuses."""
    # One that was to stop at the end of its epoch has only now been stopped.
    stopped_at = case((runs.c.stop_mode == "epoch_end", func.coalesce(runs.c.stop_requested_at, func.now())),
                      else_=runs.c.stop_requested_at)  # fmt: skip
    return _guarded(run_id, epoch, LIVE, "cancelled", "stopped on request", stop_requested_at=stopped_at)


def hand_back(run_id: str, epoch: int, reason: str, delay_seconds: float = 0.0) -> Executable:
    """The worker gives the run back in good order (drain): it waits again, and this is no loss.

    For `delay_seconds` nobody is to take it, where what it needs is away.
    """
    return _requeue(_live(run_id, epoch), reason, "handed_back", counted=False, delay_seconds=delay_seconds)


def retry(run_id: str, epoch: int, reason: str, delay_seconds: float) -> Executable:
    """The trainer was lost for a cause outside the run: it waits again, after a pause, so many times."""
    return _requeue(_live(run_id, epoch), reason, "retried", counted=True, delay_seconds=delay_seconds)


def repair(run_id: str, epoch: int, reason: str) -> Executable:
    """The run failed, and can go on once something about it is changed: it waits again, and this is no loss."""
    return _requeue(_live(run_id, epoch), reason, "repaired", counted=False, delay_seconds=0.0)


def reap(lease_seconds: float) -> Executable:
    """Take back every run whose lease has expired, unless Postgres itself has only just come up.

    The pause covers the rest of a lease: a trainer that nobody reaches any more is dead before another starts.
    A lease has expired if it had when this transaction began: a server that froze behind that moment has answered no
    renewal since.
    """
    up_long_enough = func.pg_postmaster_start_time() < func.clock_timestamp() - seconds(lease_seconds)
    expired = and_(runs.c.status.in_(LIVE), runs.c.lease_expires_at < func.now(), up_long_enough)
    return _requeue(
        expired,
        "worker lost: its lease ran out",
        "lost",
        counted=True,
        delay_seconds=lease_seconds / 3,
        skip_locked=True,
    )


def reap_dead(worker_ids: list[str]) -> Executable:
    """Take back the runs of workers whose process is known to be gone; no lease has to run out for that."""
    owned = and_(runs.c.status.in_(LIVE), runs.c.lease_owner.in_(worker_ids))
    return _requeue(
        owned, "worker lost: its process is gone", "lost", counted=True, delay_seconds=0.0, skip_locked=True
    )


def request_stop(run_id: str, save_checkpoint: bool, mode: str | None = None) -> Executable:
    """Ask a run to stop now; one that waits ends at once, so no claim can slip in between. No row: it has ended.

    The first such request stands, but for one that wants nothing saved. `mode` (None: as `save_checkpoint` says) is
    checkpoint, best or discard, and is only kept to be shown.
    """
    mode = mode or ("checkpoint" if save_checkpoint else "discard")
    is_first = runs.c.stop_requested_at.is_(None)
    unfinished = and_(runs.c.id == run_id, runs.c.status.not_in(TERMINAL))
    return statement(
        _pick(unfinished),
        case((runs.c.status == "pending", "cancelled"), else_=runs.c.status),
        "stopped on request",
        stop_requested_at=func.coalesce(runs.c.stop_requested_at, func.now()),
        stop_save_checkpoint=case(
            (is_first, save_checkpoint),
            else_=and_(runs.c.stop_save_checkpoint, literal(save_checkpoint or mode != "discard")),
        ),
        stop_mode=case((or_(is_first, literal(mode == "discard")), mode), else_=runs.c.stop_mode),
    )


def request_stop_at_epoch_end(run_id: str) -> Executable:
    """Ask a run to stop once its epoch is over; a request to stop now, before or after, wins. No row: it has ended.

    A run that has never begun ends at once. Any other goes on, is requeued when its worker is lost, and is `cancelled`
    by the worker that sees the epoch end.
    """
    unfinished = and_(runs.c.id == run_id, runs.c.status.not_in(TERMINAL))
    never_begun = and_(runs.c.status == "pending", runs.c.attempt == 0)
    return statement(
        _pick(unfinished),
        case((never_begun, "cancelled"), else_=runs.c.status),
        "stopped on request",
        stop_requested_at=case((never_begun, func.now()), else_=runs.c.stop_requested_at),
        stop_mode=case((runs.c.stop_requested_at.is_(None), "epoch_end"), else_=runs.c.stop_mode),
    )


def renew(run_id: str, epoch: int, lease_seconds: float) -> Executable:
    """Keep the lease. The row tells what was asked for (a stop, actions); no row: the run belongs to somebody else."""
    asked = func.json_build_object(
        text("'id'"), actions.c.id, text("'action'"), actions.c.action, text("'parameters'"), actions.c.parameters
    )
    waiting = (
        select(func.json_agg(aggregate_order_by(asked, actions.c.id)))
        .where(actions.c.run_id == runs.c.id, actions.c.status == "waiting")
        .scalar_subquery()
        .label("actions")
    )
    return (
        update(runs)
        .where(runs.c.id == run_id, runs.c.epoch == epoch, runs.c.lease_owner.is_not(None))
        .values(lease_expires_at=func.clock_timestamp() + seconds(lease_seconds))
        .returning(runs.c.stop_requested_at, runs.c.stop_save_checkpoint, runs.c.stop_mode, waiting)
    )


def hint_due(limit: int) -> Executable:
    """Mark the waiting runs that no worker has been told of for 30 s; a row per hint to send."""
    due = (
        select(runs.c.id)
        .where(
            runs.c.status == "pending",
            runs.c.not_before <= func.clock_timestamp(),
            or_(
                runs.c.hinted_at.is_(None),
                runs.c.hinted_at < func.clock_timestamp() - text("interval '30 s'"),
            ),
        )
        .order_by(runs.c.priority.desc(), runs.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    return update(runs).where(runs.c.id.in_(due)).values(hinted_at=func.clock_timestamp()).returning(runs.c.id)


def _live(run_id: str, epoch: int) -> ColumnElement[bool]:
    return and_(runs.c.id == run_id, runs.c.epoch == epoch, runs.c.status.in_(LIVE))


def _pick(where: ColumnElement[bool], skip_locked: bool = False) -> CTE:
    chosen: Select[Any] = select(runs.c.id, runs.c.status.label("from_status")).where(where)
    return chosen.with_for_update(skip_locked=skip_locked).cte("picked")


def _guarded(run_id: str, epoch: int, sources: tuple[str, ...], target: str, reason: str, **values: Any) -> Executable:
    where = and_(runs.c.id == run_id, runs.c.epoch == epoch, runs.c.status.in_(sources))
    return statement(_pick(where), literal(target), reason, **values)


def _requeue(
    where: ColumnElement[bool],
    reason: str,
    outcome: str,
    *,
    counted: bool,
    delay_seconds: float,
    skip_locked: bool = False,
) -> Executable:
    # A first loss whose cause is known needs no pause; one that comes again does.
    delay = case((runs.c.lost_count == 0, seconds(delay_seconds)), else_=seconds(max(delay_seconds, _LEAST_PAUSE)))
    exhausted = and_(literal(counted), runs.c.lost_count >= runs.c.max_restarts)
    target = case((runs.c.stop_requested_at.is_not(None), "cancelled"), (exhausted, "failed"), else_="pending")
    fails = and_(runs.c.stop_requested_at.is_(None), exhausted)
    gave_up = func.concat(
        reason, " (", runs.c.lost_count + 1, " times without a new checkpoint, max_restarts is ", runs.c.max_restarts,
        "): see the last log lines, then resume the run",
    )  # fmt: skip
    return statement(
        _pick(where, skip_locked),
        target,
        reason,
        outcome=outcome,
        epoch=runs.c.epoch + 1,
        lost_count=runs.c.lost_count + int(counted),
        hinted_at=None,
        # Twice the pause after each further loss, so that a run that kills its workers does not do it in a loop.
        not_before=func.clock_timestamp() + delay * func.power(2, func.least(runs.c.lost_count, _MOST_DOUBLINGS)),
        error_code=case((fails, "worker_lost"), else_=None),
        error_message=case((fails, gave_up), else_=None),
    )
