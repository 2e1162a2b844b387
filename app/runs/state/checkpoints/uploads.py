"""Statements with which workers send checkpoints to the object store, and remove them there."""

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Executable, and_, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import Insert, insert

from app.tables.checkpoints import Checkpoint, ReplicaDeletion
from app.tables.runs import Run

_AT_ONCE = 200
_OVERDUE = timedelta(minutes=1)
_ABANDONED = timedelta(minutes=10)
"""Time without a claim renewal after which an upload counts as abandoned: its worker is gone or was stalled."""
_WANTED = and_(Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None), Checkpoint.replicated_at.is_(None))


def _is_abandoned() -> ColumnElement[bool]:
    return Checkpoint.replica_started_at < func.clock_timestamp() - _ABANDONED


def claim_upload(checkpoint_id: str, noted: datetime | None) -> Executable:
    """Claim or renew the upload of a checkpoint; no row if it is not to be sent or another worker sends it.

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
    """Mark an upload as complete; no row if the checkpoint was deleted meanwhile or another worker claimed it."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.deleted_at.is_(None), Checkpoint.replica_started_at == noted)
        .values(replicated_at=func.clock_timestamp())
        .returning(Checkpoint.id)
    )


def owned_by_other_worker(checkpoint_id: str, noted: datetime) -> Executable:
    """Return a row if the worker with claim `noted` must not remove what it has sent.

    The upload is complete and the checkpoint exists, or another worker has claimed it.
    """
    is_whole = and_(Checkpoint.replicated_at.is_not(None), Checkpoint.deleted_at.is_(None))
    is_others = Checkpoint.replica_started_at.is_distinct_from(noted)
    return select(Checkpoint.id).where(Checkpoint.id == checkpoint_id, or_(is_whole, is_others))


def mark_corrupt(checkpoint_id: str, replicated_at: datetime) -> Executable:
    """Mark the upload completed at `replicated_at` as corrupt, so that a worker that has the checkpoint repeats it."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.replicated_at == replicated_at)
        .values(replicated_at=None)
    )


def is_to_be_sent() -> ColumnElement[bool]:
    """Return the condition that a checkpoint is not in the store and neither deleted nor corrupt."""
    return _WANTED


def select_overdue(before: str | None = None) -> Executable:
    """Return one page of checkpoints that no worker sends, newest first: theirs is gone or behind.

    `before` is the last id of the previous page.
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
    )
    if before is not None:
        query = query.where(Checkpoint.id < before)
    return query.where(_WANTED, free, late).order_by(Checkpoint.id.desc()).limit(_AT_ONCE)


def to_remove(after: str = "") -> Executable:
    """Return one page of deleted checkpoints that still have files in the store, with ids above `after`.

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


def record_removal(checkpoint_id: str, noted: datetime) -> Executable:
    """Record that a checkpoint is removed from the store, unless another worker has started an upload after `noted`."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.replica_started_at == noted)
        .values(replica_started_at=None, replicated_at=None)
    )


def schedule_removal(run_id: str) -> Insert:
    """Schedule another removal of everything that a deleted run has in the object store, for after all uploads.

    A worker that did not know of the deletion may have sent something after the API removed it.
    """
    values = {"run_id": run_id, "not_before": func.clock_timestamp() + _ABANDONED}
    return insert(ReplicaDeletion).values(values).on_conflict_do_nothing()


def runs_to_remove(after: str = "") -> Executable:
    """Return one page of deleted runs that may still have files in the store, with ids above `after`."""
    due = and_(ReplicaDeletion.not_before <= func.clock_timestamp(), ReplicaDeletion.run_id > after)
    return select(ReplicaDeletion.run_id.label("id")).where(due).order_by(ReplicaDeletion.run_id).limit(_AT_ONCE)


def run_removed(run_id: str) -> Executable:
    """Record that everything of a deleted run is removed from the store."""
    return delete(ReplicaDeletion).where(ReplicaDeletion.run_id == run_id)
