"""State machine of a run: the transitions of `runs.status`.

    pending ──claim──▶ initializing ──begin──▶ running ◀─end_save─ checkpointing
     ▲  │                   │                   │  └──begin_save─────▲
     │  └─request_stop─▶ cancelled              │
     └──── release · retry · repair · reap ◀──┤   (cancelled when a stop was asked, failed past max_restarts)
                                                └──▶ complete · fail · cancel

Each function returns one SQLAlchemy statement that async and sync sessions both execute. It combines a guarded UPDATE,
the events of the transition (`status`, before an end also `error`, and `end`), the end of the attempt and the release
of the devices. Its rows are the runs that moved, with the columns of `Run` and `from_status`; no row means that the
caller is stale and must stop.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Executable,
    Integer,
    Select,
    Text,
    and_,
    bindparam,
    case,
    column,
    func,
    literal,
    null,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by, insert
from sqlalchemy.sql.selectable import CTE

from anneal.contracts.backends import WORKER_BACKENDS
from anneal.contracts.run_status import LIVE, TERMINAL, EndReason
from anneal.contracts.schemas.runs.placement import PendingReason
from anneal.contracts.stop import StopMode
from app.infra.db import interval_seconds
from app.runs.state.parts import is_over, is_up_long_enough
from app.runs.state.transitions import (
    EVENT_COLUMNS,
    actions,
    as_json,
    attempts,
    claimed,
    devices,
    events,
    extra_eval_datasets,
    move,
    run_parts,
    runs,
    statement,
)
from app.tables.base import equals_any

WORKER_LOST = "worker lost"
"""Start of the reason, and of the error message, if the worker of an attempt was lost."""
_LEAST_PAUSE = 1.0
_MOST_DOUBLINGS = 6


def create(values: dict[str, Any], reason: str = "created") -> Executable:
    """Insert a pending run and its first event; no row if its id or idempotency key already exists."""
    new = insert(runs).values(**values, status="pending", event_seq=1)
    inserted = new.on_conflict_do_nothing().returning(*runs.c).cte("inserted")
    first = select(
        inserted.c.id,
        literal(1),
        literal("status"),
        literal(0),
        func.clock_timestamp(),
        as_json(**{"from": null(), "to": inserted.c.status, "reason": literal(reason), "attempt": literal(0)}),
    )
    logged = insert(events).from_select(EVENT_COLUMNS, first).returning(events.c.seq).cte("logged")
    return select(inserted).add_cte(logged)


def claim(worker_id: str, lease_seconds: float) -> Executable:
    """Claim a pending run with devices that `app.runs.queue.claim` has chosen; all of them, or no row.

    `chosen_devices` returns the parameters of the statement. Part 0 is that of the lead, `worker_id`, which gets rank 0
    and owns the run; the others get a part each, whose lease begins now. The row adds `device_indexes` of the lead,
    `members` (ids of the other workers; None without any) and `extra_eval_datasets` (ids by name; None without any).
    """
    run_id = bindparam("claimed_run", type_=Text)
    unnested = (
        func.unnest(
            bindparam("claimed_parts", type_=ARRAY(Integer)),
            bindparam("claimed_workers", type_=ARRAY(Text)),
            bindparam("claimed_indexes", type_=ARRAY(Integer)),
        )
        .table_valued(column("part", Integer), column("worker_id", Text), column("index", Integer))
        .render_derived(name="unnested")
    )
    chosen = select(run_id.label("run_id"), unnested).cte("chosen")
    is_chosen = and_(devices.c.worker_id == chosen.c.worker_id, devices.c.index == chosen.c.index)
    free = select(func.count()).select_from(devices.join(chosen, is_chosen)).where(devices.c.run_id.is_(None))
    picked = (
        select(runs.c.id, runs.c.status.label("from_status"))
        .where(
            runs.c.id == run_id,
            runs.c.status == "pending",
            runs.c.lease_epoch == bindparam("claimed_epoch", type_=Integer),
            runs.c.stop_requested_at.is_(None),
            runs.c.devices_needed == free.scalar_subquery(),
        )
        # NO KEY UPDATE: a row that refers to the run and is being inserted, such as its estimate, must not hide it.
        .with_for_update(key_share=True, skip_locked=True)
        .cte("picked")
    )
    moved, parts = claimed(picked, worker_id, lease_seconds)
    taken = (
        update(devices)
        .where(is_chosen, chosen.c.run_id == moved.c.id)
        .values(run_id=moved.c.id, lease_epoch=moved.c.lease_epoch)
        .returning(devices.c.worker_id, devices.c.index, chosen.c.part)
        .cte("taken")
    )
    others = (
        select(
            moved.c.id,
            moved.c.lease_epoch,
            taken.c.part,
            taken.c.worker_id,
            taken.c.part * (moved.c.devices_needed / moved.c.hosts_needed),
            func.array_agg(aggregate_order_by(taken.c.index, taken.c.index)),
            moved.c.lease_expires_at,
        )
        .select_from(moved.join(taken, taken.c.part > 0))
        .group_by(
            moved.c.id,
            moved.c.lease_epoch,
            taken.c.part,
            taken.c.worker_id,
            moved.c.devices_needed,
            moved.c.hosts_needed,
            moved.c.lease_expires_at,
        )
    )
    columns = ["run_id", "lease_epoch", "part", "worker_id", "first_rank", "device_indexes", "lease_expires_at"]
    opened_parts = insert(run_parts).from_select(columns, others).returning(run_parts.c.worker_id).cte("opened_parts")
    own = select(func.array_agg(taken.c.index)).where(taken.c.part == 0).scalar_subquery().label("device_indexes")
    members = select(func.array_agg(opened_parts.c.worker_id)).scalar_subquery().label("members")
    return select(moved, own, members, extra_eval_datasets(moved)).add_cte(*parts)


def chosen_devices(
    run_id: str, lease_epoch: int, model: str, devices: Sequence[tuple[int, str, int]]
) -> dict[str, Any]:
    """Return the parameters of `claim`: of each device the part of the run that it trains, its worker and its index."""
    parts, workers, indexes = (list(values) for values in zip(*devices, strict=True))
    # Names of columns would also set these, in each UPDATE of the statement.
    return {
        "claimed_run": run_id,
        "claimed_epoch": lease_epoch,
        "claimed_device": model,
        "claimed_parts": parts,
        "claimed_workers": workers,
        "claimed_indexes": indexes,
    }


def begin(
    run_id: str,
    lease_epoch: int,
    start_step: int,
    start_epoch: float,
    total_steps: int | None,
    best_loss: float | None,
    best_score: float | None = None,
) -> Executable:
    """Enter `running` before the first optimizer step; progress of earlier attempts beyond it is rolled back."""
    progress: dict[str, Any] = {
        "current_step": start_step,
        "current_epoch": start_epoch,
        "best_loss": best_loss,
        "best_score": best_score,
        "total_steps": total_steps,
    }
    where = and_(runs.c.id == run_id, runs.c.lease_epoch == lease_epoch, runs.c.status == "initializing")
    moved, parts = move(_pick(where), literal("running"), literal("training"), **progress)
    started = (
        update(attempts)
        .where(attempts.c.run_id == moved.c.id, attempts.c.attempt == moved.c.attempt)
        .values(start_step=start_step)
        .returning(attempts.c.attempt)
        .cte("started")
    )
    # The attempt has not ended, so `closed` and `started` do not update the same row.
    return select(moved).add_cte(*parts, started)


def begin_save(run_id: str, lease_epoch: int) -> Executable:
    """Enter `checkpointing`: a checkpoint is being written."""
    return _guarded(run_id, lease_epoch, ("running",), "checkpointing", "saving a checkpoint")


def end_save(run_id: str, lease_epoch: int) -> Executable:
    """Return to `running`: the checkpoint is written."""
    return _guarded(run_id, lease_epoch, ("checkpointing",), "running", "training")


def complete(
    run_id: str, lease_epoch: int, output_attempt: int | None, reason: str, end_reason: EndReason = "finished"
) -> Executable:
    """Complete the run; its output is in the folder of `output_attempt`."""
    values = {"output_attempt": output_attempt, "end_reason": end_reason}
    return _guarded(run_id, lease_epoch, LIVE, "completed", reason, **values)


def fail(run_id: str, lease_epoch: int, code: str, message: str) -> Executable:
    """Fail the run with a classified error."""
    return _guarded(run_id, lease_epoch, LIVE, "failed", code, error_code=code, error_message=message)


def cancel(run_id: str, lease_epoch: int) -> Executable:
    """Cancel the run because a stop was requested; without such a request a constraint rejects it."""
    # A stop at the end of the epoch takes effect only now.
    stopped_at = case((runs.c.stop_mode == "epoch_end", func.coalesce(runs.c.stop_requested_at, func.now())),
                      else_=runs.c.stop_requested_at)  # fmt: skip
    return _guarded(run_id, lease_epoch, LIVE, "cancelled", "stopped on request", stop_requested_at=stopped_at)


def release(run_id: str, lease_epoch: int, reason: str, delay_seconds: float = 0.0) -> Executable:
    """Release the run to the queue in good order (drain); this does not count as a loss.

    It is not claimed for `delay_seconds`, for when something that it needs is unavailable.
    """
    return _requeue(_live(run_id, lease_epoch), reason, "handed_back", counted=False, delay_seconds=delay_seconds)


def retry(run_id: str, lease_epoch: int, reason: str, delay_seconds: float, code: str = "worker_lost") -> Executable:
    """Requeue a run whose trainer was lost for an external cause, after a delay.

    At the limit, `max_restarts`, the run fails with `code` instead.
    """
    live = _live(run_id, lease_epoch)
    return _requeue(live, reason, "retried", counted=True, delay_seconds=delay_seconds, code=code)


def repair(run_id: str, lease_epoch: int, reason: str) -> Executable:
    """Requeue a failed run that can continue with a changed setting; this does not count as a loss."""
    return _requeue(_live(run_id, lease_epoch), reason, "repaired", counted=False, delay_seconds=0.0)


@cache
def reap(lease_seconds: float) -> Executable:
    """Reap every run whose lease has expired, unless Postgres itself has only just started.

    The delay covers the rest of a lease: a trainer that is no longer reachable is dead before another starts.
    Leases are compared with the start of this transaction: a server that froze after that moment has answered no
    renewal since.
    """
    up_long_enough = is_up_long_enough(lease_seconds)
    expired = and_(runs.c.status.in_(LIVE), runs.c.lease_expires_at < func.now(), up_long_enough)
    return _requeue(
        expired,
        f"{WORKER_LOST}: its lease ran out",
        "lost",
        counted=True,
        delay_seconds=lease_seconds / 3,
        skip_locked=True,
    )


def reap_dead(worker_ids: list[str]) -> Executable:
    """Reap the runs of workers whose process is known to be gone, without waiting for their leases."""
    owned = and_(runs.c.status.in_(LIVE), runs.c.lease_owner.in_(worker_ids))
    return _requeue(
        owned, f"{WORKER_LOST}: its process is gone", "lost", counted=True, delay_seconds=0.0, skip_locked=True
    )


def request_stop(run_id: str, mode: StopMode, grace_seconds: float | None = None) -> Executable:
    """Request an immediate stop; a pending run ends at once, so no claim can intervene. No row: it has ended.

    The first such request counts, unless a later one saves nothing. `mode` is checkpoint, best or discard. The last
    `grace_seconds` count: seconds that the trainer has.
    """
    is_first = runs.c.stop_requested_at.is_(None)
    unfinished = and_(runs.c.id == run_id, runs.c.status.not_in(TERMINAL))
    return statement(
        _pick(unfinished),
        case((runs.c.status == "pending", "cancelled"), else_=runs.c.status),
        "stopped on request",
        stop_requested_at=func.coalesce(runs.c.stop_requested_at, func.now()),
        stop_mode=case((or_(is_first, literal(mode == "discard")), mode), else_=runs.c.stop_mode),
        stop_grace_seconds=runs.c.stop_grace_seconds if grace_seconds is None else grace_seconds,
    )


def request_stop_at_epoch_end(run_id: str) -> Executable:
    """Request a stop at the end of the epoch; an immediate stop, before or after, wins. No row: it has ended.

    A run that was never claimed ends at once. Any other run continues, is requeued if its worker is lost, and is
    `cancelled` by the worker that reaches the end of the epoch.
    """
    unfinished = and_(runs.c.id == run_id, runs.c.status.not_in(TERMINAL))
    never_claimed = and_(runs.c.status == "pending", runs.c.attempt == 0)
    return statement(
        _pick(unfinished),
        case((never_claimed, "cancelled"), else_=runs.c.status),
        "stopped on request",
        stop_requested_at=case((never_claimed, func.now()), else_=runs.c.stop_requested_at),
        stop_mode=case((runs.c.stop_requested_at.is_(None), "epoch_end"), else_=runs.c.stop_mode),
    )


def renew(run_id: str, lease_epoch: int, lease_seconds: float) -> Executable:
    """Renew the lease and return what is asked (a stop, room, actions); no row: another worker owns the run.

    A request to make room for a run that waits no more, or that is no longer above this one, is withdrawn. Serving runs
    make room for each other, which have the same priority.
    Of a run on several hosts, the row also has the parts of other workers that have ended or are about to.
    """
    action = func.json_build_object(
        text("'id'"), actions.c.id, text("'action'"), actions.c.action, text("'parameters'"), actions.c.parameters
    )
    waiting = (
        select(func.json_agg(aggregate_order_by(action, actions.c.id)))
        .where(actions.c.run_id == runs.c.id, actions.c.status == "waiting")
        .scalar_subquery()
        .label("actions")
    )
    above = runs.alias("above")
    is_above = above.c.priority > runs.c.priority
    still_waits = (
        select(above.c.id)
        .where(above.c.id == runs.c.preempted_for, above.c.status == "pending", or_(is_above, runs.c.task == "serve"))
        .correlate(runs)
        .scalar_subquery()
    )
    # Not those that run as they should, which are almost always all.
    part = func.json_build_object(
        text("'part'"), run_parts.c.part, text("'worker_id'"), run_parts.c.worker_id, text("'first_rank'"),
        run_parts.c.first_rank, text("'devices'"), func.cardinality(run_parts.c.device_indexes), text("'is_leaving'"),
        run_parts.c.is_leaving, text("'ended'"), is_over(), text("'outcome'"), run_parts.c.outcome,
    )  # fmt: skip
    ending = (
        select(func.json_agg(aggregate_order_by(part, run_parts.c.ended_at)))
        .where(
            run_parts.c.run_id == runs.c.id,
            run_parts.c.lease_epoch == runs.c.lease_epoch,
            or_(is_over(), run_parts.c.is_leaving),
        )
        .scalar_subquery()
    )
    parts = case((runs.c.hosts_needed > 1, ending), else_=null()).label("parts")
    does = func.json_build_object(
        text("'worker_id'"), run_parts.c.worker_id, text("'first_rank'"), run_parts.c.first_rank, text("'devices'"),
        func.cardinality(run_parts.c.device_indexes), text("'activity'"), run_parts.c.activity,
    )  # fmt: skip
    active = (
        select(func.json_agg(aggregate_order_by(does, run_parts.c.part)))
        .where(
            run_parts.c.run_id == runs.c.id,
            run_parts.c.lease_epoch == runs.c.lease_epoch,
            run_parts.c.ended_at.is_(None),
            run_parts.c.activity.is_not(None),
        )
        .scalar_subquery()
    )
    activities = case((runs.c.hosts_needed > 1, active), else_=null()).label("activities")
    return (
        update(runs)
        .where(runs.c.id == run_id, runs.c.lease_epoch == lease_epoch, runs.c.lease_owner.is_not(None))
        .values(lease_expires_at=func.clock_timestamp() + interval_seconds(lease_seconds), preempted_for=still_waits)
        .returning(runs.c.stop_mode, runs.c.stop_grace_seconds, runs.c.preempted_for, waiting, parts, activities)
    )


def requeue_unclaimed(run_id: str, lease_epoch: int, reason: str, delay_seconds: float, *, counted: bool) -> Executable:
    """Requeue a pending run that no worker has claimed; no row: it waits no more.

    `counted`: its worker failed, which is a loss. Otherwise something that it needs was unavailable.
    """
    waits = and_(runs.c.id == run_id, runs.c.lease_epoch == lease_epoch, runs.c.status == "pending")
    return _requeue(
        waits,
        reason,
        "requeued",
        counted=counted,
        delay_seconds=delay_seconds,
        grows=counted,
        code="worker_not_started",
        advice="see `ray job logs` of that job and the environment of the nodes, then resume the run; one that has no "
        'checkpoint with {"from": "start"}',
    )


def preempt(run_ids: list[str], for_run: str) -> Executable:
    """Ask live runs to save and return to the queue, in favor of a pending run; a row for each that was asked."""
    waits = select(runs.c.id).where(runs.c.id == for_run, runs.c.status == "pending").scalar_subquery()
    # In the order of all who lock several runs (`service.lock_runs`).
    victims = select(runs.c.id).where(runs.c.id.in_(run_ids)).order_by(runs.c.id.desc())
    locked = victims.with_for_update(key_share=True).cte("locked")
    return (
        update(runs)
        .where(
            runs.c.id == locked.c.id,
            runs.c.status.in_(LIVE),
            runs.c.stop_requested_at.is_(None),
            runs.c.preempted_for.is_(None),
            waits.is_not(None),
        )
        .values(preempted_for=waits)
        .returning(runs.c.id)
    )


def mark_notified(limit: int, startable: Sequence[str] = ()) -> Executable:
    """Mark the pending runs without a hint in the last 30 s; one row per hint to send.

    Those of `startable`, which could start now, are due after a second: their hint has reached a worker that they do
    not fit.
    """
    silence = func.clock_timestamp() - runs.c.notified_at
    due = (
        select(runs.c.id)
        .where(
            runs.c.status == "pending",
            runs.c.backend.in_(WORKER_BACKENDS),
            runs.c.not_before <= func.clock_timestamp(),
            or_(
                runs.c.notified_at.is_(None),
                silence > text("interval '30 s'"),
                and_(silence > text("interval '1 s'"), equals_any(runs.c.id, startable)),
            ),
        )
        .order_by(runs.c.priority.desc(), runs.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    return update(runs).where(runs.c.id.in_(due)).values(notified_at=func.clock_timestamp()).returning(runs.c.id)


def report_pending_reason(run_id: str, reason: PendingReason | None) -> Executable:
    """Store why a pending run cannot start, or that it can again (None), with an event; no row: it waits no more."""
    event_reason = reason or PendingReason(code="queued", message="A worker that can take the run is online.")
    picked = _pick(and_(runs.c.id == run_id, runs.c.status == "pending"), skip_locked=True)
    moved = (
        update(runs)
        .where(runs.c.id == picked.c.id)
        .values(pending_reason=null() if reason is None else reason.model_dump(), event_seq=runs.c.event_seq + 1)
        .returning(runs.c.id, runs.c.event_seq, runs.c.attempt)
        .cte("moved")
    )
    data = as_json(code=literal(event_reason.code), message=literal(event_reason.message))
    new = select(moved.c.id, moved.c.event_seq, literal("pending"), moved.c.attempt, func.clock_timestamp(), data)
    logged = insert(events).from_select(EVENT_COLUMNS, new).returning(events.c.seq).cte("logged")
    return select(moved.c.id).add_cte(logged)


def _live(run_id: str, lease_epoch: int) -> ColumnElement[bool]:
    return and_(runs.c.id == run_id, runs.c.lease_epoch == lease_epoch, runs.c.status.in_(LIVE))


def _pick(where: ColumnElement[bool], skip_locked: bool = False) -> CTE:
    chosen: Select[Any] = select(runs.c.id, runs.c.status.label("from_status")).where(where)
    return chosen.with_for_update(skip_locked=skip_locked).cte("picked")


def _guarded(
    run_id: str, lease_epoch: int, sources: tuple[str, ...], target: str, reason: str, **values: Any
) -> Executable:
    where = and_(runs.c.id == run_id, runs.c.lease_epoch == lease_epoch, runs.c.status.in_(sources))
    return statement(_pick(where), literal(target), reason, **values)


def _requeue(
    where: ColumnElement[bool],
    reason: str,
    outcome: str,
    *,
    counted: bool,
    delay_seconds: float,
    grows: bool = True,
    skip_locked: bool = False,
    code: str = "worker_lost",
    advice: str = "see the last log lines, then resume the run",
) -> Executable:
    # A first loss whose cause is known needs no delay; a repeated one does.
    delay = case(
        (runs.c.lost_count == 0, interval_seconds(delay_seconds)),
        else_=interval_seconds(max(delay_seconds, _LEAST_PAUSE)),
    )
    exhausted = and_(literal(counted), runs.c.lost_count >= runs.c.max_restarts)
    target = case((runs.c.stop_requested_at.is_not(None), "cancelled"), (exhausted, "failed"), else_="pending")
    fails = and_(runs.c.stop_requested_at.is_(None), exhausted)
    gave_up = func.concat(
        reason, " (", runs.c.lost_count + 1, " times without a new checkpoint, max_restarts is ", runs.c.max_restarts,
        "): ", advice,
    )  # fmt: skip
    return statement(
        _pick(where, skip_locked),
        target,
        reason,
        outcome=outcome,
        lease_epoch=runs.c.lease_epoch + 1,
        lost_count=runs.c.lost_count + int(counted),
        notified_at=None,
        # The delay doubles with each further loss, so that a run that kills its workers does not do so in a loop.
        queued_at=func.clock_timestamp(),
        not_before=func.clock_timestamp()
        + (
            delay * func.power(2, func.least(runs.c.lost_count, _MOST_DOUBLINGS))
            if grows
            else interval_seconds(delay_seconds)
        ),
        error_code=case((fails, code), else_=None),
        error_message=case((fails, gave_up), else_=None),
    )
