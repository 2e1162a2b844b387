"""Statements with which workers create and remove checkpoint replicas at `ANNEAL_CHECKPOINT_URL`."""

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Executable, Select, and_, case, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import Insert, insert

from app.contracts.run_status import TERMINAL
from app.tables.checkpoints import Checkpoint, ReplicaDeletion
from app.tables.runs import Run

_AT_ONCE = 200
_OVERDUE = timedelta(minutes=1)
_ABANDONED = timedelta(minutes=10)
"""Time without a claim renewal after which a replica upload counts as abandoned: its worker is gone or was stalled."""
_LOOK_BACK = timedelta(days=1)
_WANTED = and_(Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None), Checkpoint.replicated_at.is_(None))


def _is_abandoned() -> ColumnElement[bool]:
    return Checkpoint.replica_started_at < func.clock_timestamp() - _ABANDONED


def begin(checkpoint_id: str, noted: datetime | None) -> Executable:
    """Claim or renew the upload of a replica; no row if none is wanted or another worker uploads it.

    Repeat at least every few minutes with the last returned `replica_started_at` as `noted`. Otherwise another worker
    considers the upload abandoned and claims it, and this worker gets no row. Returns `replica_started_at` and the
    run's lease epoch.
    """
    free = or_(Checkpoint.replica_started_at.is_(None), _is_abandoned())
    lease_epoch = select(Run.lease_epoch).where(Run.id == Checkpoint.run_id).scalar_subquery()
    return (
        update(Checkpoint)
        .where(
            Checkpoint.id == checkpoint_id, _WANTED, free if noted is None else Checkpoint.replica_started_at == noted
        )
        .values(replica_started_at=func.clock_timestamp())
        .returning(Checkpoint.replica_started_at, lease_epoch.label("lease_epoch"))
    )


def mark_complete(checkpoint_id: str, noted: datetime) -> Executable:
    """Mark the replica as complete; no row if the checkpoint was deleted meanwhile or another worker claimed it."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.deleted_at.is_(None), Checkpoint.replica_started_at == noted)
        .values(replicated_at=func.clock_timestamp())
        .returning(Checkpoint.id)
    )


def owned_by_other_worker(checkpoint_id: str, noted: datetime) -> Executable:
    """Return a row if the worker with claim `noted` must not remove the replica.

    The replica is complete and its checkpoint exists, or another worker has claimed it.
    """
    is_whole = and_(Checkpoint.replicated_at.is_not(None), Checkpoint.deleted_at.is_(None))
    is_others = Checkpoint.replica_started_at.is_distinct_from(noted)
    return select(Checkpoint.id).where(Checkpoint.id == checkpoint_id, or_(is_whole, is_others))


def any_replica() -> Executable:
    """Return a row if any checkpoint has a complete replica."""
    return select(Checkpoint.id).where(Checkpoint.replicated_at.is_not(None)).limit(1)


def mark_replica_corrupt(checkpoint_id: str, replicated_at: datetime) -> Executable:
    """Mark the replica completed at `replicated_at` as corrupt, so that a worker uploads it again."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.replicated_at == replicated_at)
        .values(replicated_at=None)
    )


def is_to_be_sent() -> ColumnElement[bool]:
    """Return the condition that a checkpoint has no replica and is neither deleted nor corrupt."""
    return _WANTED


def without_replica(before: str | None = None, *, is_storage: bool = False) -> Executable:
    """Return checkpoints without a replica upload, newest first: their worker is gone or behind.

    Those of runs that ended more than a day ago are left out, unless the store is the storage itself (`is_storage`),
    whose workers have only copies. Returns one page; `before` is the last id of the previous page.
    """
    late = Checkpoint.created_at < func.clock_timestamp() - _OVERDUE
    free = or_(Checkpoint.replica_started_at.is_(None), _is_abandoned())
    query = select(
        Checkpoint.id,
        Checkpoint.run_id,
        Checkpoint.attempt,
        Checkpoint.name,
        Checkpoint.step,
        Checkpoint.manifest_sha256,
    ).join(Run, Run.id == Checkpoint.run_id)
    if before is not None:
        query = query.where(Checkpoint.id < before)
    if not is_storage:
        is_recent = Run.finished_at > func.clock_timestamp() - _LOOK_BACK
        query = query.where(or_(Run.status.not_in(TERMINAL), is_recent))
    return query.where(_WANTED, free, late).order_by(Checkpoint.id.desc()).limit(_AT_ONCE)


def to_remove(after: str = "") -> Executable:
    """Return one page of deleted checkpoints that still have replica files, with ids above `after`.

    `is_sent` is true if a worker may be uploading now; that worker notices the deletion and removes the files itself.
    """
    left = and_(Checkpoint.deleted_at.is_not(None), Checkpoint.replica_started_at.is_not(None), Checkpoint.id > after)
    is_sent = and_(Checkpoint.replicated_at.is_(None), ~_is_abandoned())
    return (
        select(
            Checkpoint.id,
            Checkpoint.run_id,
            Checkpoint.attempt,
            Checkpoint.name,
            Checkpoint.replica_started_at,
            is_sent.label("is_sent"),
        )
        .where(left)
        .order_by(Checkpoint.id)
        .limit(_AT_ONCE)
    )


def removed(checkpoint_id: str, noted: datetime) -> Executable:
    """Record that a checkpoint's replica is removed, unless another worker has started an upload after `noted`."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.replica_started_at == noted)
        .values(replica_started_at=None, replicated_at=None)
    )


def schedule_replica_deletion(runs: Select[str]) -> Insert:
    """Schedule the removal of the replicas of `runs`, whose rows are deleted in this transaction.

    If a worker may be uploading one now, the removal waits until that worker has noticed the deletion.
    """
    sent = case((Checkpoint.replicated_at.is_(None), Checkpoint.replica_started_at + _ABANDONED))
    copied = (
        select(Checkpoint.run_id, func.coalesce(func.max(sent), func.now()))
        .where(Checkpoint.run_id.in_(runs), Checkpoint.replica_started_at.is_not(None))
        .group_by(Checkpoint.run_id)
    )
    return insert(ReplicaDeletion).from_select(["run_id", "not_before"], copied).on_conflict_do_nothing()


def schedule_second_removal(run_id: str) -> Insert:
    """Schedule another removal of everything that a deleted run has in an object store.

    A worker that did not know of the deletion may have sent something after the first one.
    """
    values = {"run_id": run_id, "not_before": func.clock_timestamp() + _ABANDONED}
    return insert(ReplicaDeletion).values(values).on_conflict_do_nothing()


def runs_to_remove(after: str = "") -> Executable:
    """Return one page of deleted runs that may still have replica files, with ids above `after`."""
    due = and_(ReplicaDeletion.not_before <= func.clock_timestamp(), ReplicaDeletion.run_id > after)
    return select(ReplicaDeletion.run_id.label("id")).where(due).order_by(ReplicaDeletion.run_id).limit(_AT_ONCE)


def run_removed(run_id: str) -> Executable:
    """Record that all replicas of a deleted run are removed."""
    return delete(ReplicaDeletion).where(ReplicaDeletion.run_id == run_id)
