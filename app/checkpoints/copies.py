"""Second copies of checkpoints at `ANNEAL_CHECKPOINT_URL`: statements by which workers make and remove them."""

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Executable, Select, and_, case, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import Insert, insert

from app.checkpoints.models import Checkpoint, CopyRemoval
from app.runs.models import TERMINAL, Run

_AT_ONCE = 200
_OVERDUE = timedelta(minutes=1)
_ABANDONED = timedelta(minutes=10)
"""A worker that has not said for so long that it goes on with a copy is gone, or has stood still."""
_LOOK_BACK = timedelta(days=1)
_WANTED = and_(Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None), Checkpoint.remote_at.is_(None))


def _is_abandoned() -> ColumnElement[bool]:
    return Checkpoint.copy_begun_at < func.clock_timestamp() - _ABANDONED


def begin(checkpoint_id: str, noted: datetime | None) -> Executable:
    """Note that something of a copy is there from now on; no row where none is wanted, or another worker is at it.

    To be repeated at least every few minutes with what it answered last (`noted`), or another worker takes it for
    abandoned, and then this one gets no row any more. Answers `copy_begun_at`, and the epoch of the run.
    """
    free = or_(Checkpoint.copy_begun_at.is_(None), _is_abandoned())
    epoch = select(Run.epoch).where(Run.id == Checkpoint.run_id).scalar_subquery()
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, _WANTED, free if noted is None else Checkpoint.copy_begun_at == noted)
        .values(copy_begun_at=func.clock_timestamp())
        .returning(Checkpoint.copy_begun_at, epoch.label("epoch"))
    )


def complete(checkpoint_id: str, noted: datetime) -> Executable:
    """Note that the copy is whole; no row where the checkpoint has been let go meanwhile, or is another worker's."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.deleted_at.is_(None), Checkpoint.copy_begun_at == noted)
        .values(remote_at=func.clock_timestamp())
        .returning(Checkpoint.id)
    )


def left_to_others(checkpoint_id: str, noted: datetime) -> Executable:
    """A row where whoever noted this may not remove what is there: it is whole and wanted, or another worker's."""
    is_whole = and_(Checkpoint.remote_at.is_not(None), Checkpoint.deleted_at.is_(None))
    is_others = Checkpoint.copy_begun_at.is_distinct_from(noted)
    return select(Checkpoint.id).where(Checkpoint.id == checkpoint_id, or_(is_whole, is_others))


def made() -> Executable:
    """A row where any checkpoint has a copy."""
    return select(Checkpoint.id).where(Checkpoint.remote_at.is_not(None)).limit(1)


def spoilt(checkpoint_id: str, remote_at: datetime) -> Executable:
    """Note that the copy which was whole at `remote_at` is none any more, so that whoever can sends it again."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.remote_at == remote_at)
        .values(remote_at=None)
    )


def overdue(before: str | None = None) -> Executable:
    """Checkpoints of live and just ended runs that nobody copies, newest first: their worker is gone, or behind.

    A few of them; `before` is the last id of those before.
    """
    recent = or_(Run.status.not_in(TERMINAL), Run.finished_at > func.clock_timestamp() - _LOOK_BACK)
    late = Checkpoint.created_at < func.clock_timestamp() - _OVERDUE
    free = or_(Checkpoint.copy_begun_at.is_(None), _is_abandoned())
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
    return query.where(_WANTED, free, recent, late).order_by(Checkpoint.id.desc()).limit(_AT_ONCE)


def to_remove(after: str = "") -> Executable:
    """Checkpoints that were let go, and of whose copies something is left; a few of them, with ids above `after`.

    `is_sent` where a worker may be sending just now: that one notices, and removes it itself.
    """
    left = and_(Checkpoint.deleted_at.is_not(None), Checkpoint.copy_begun_at.is_not(None), Checkpoint.id > after)
    is_sent = and_(Checkpoint.remote_at.is_(None), ~_is_abandoned())
    return (
        select(
            Checkpoint.id,
            Checkpoint.run_id,
            Checkpoint.attempt,
            Checkpoint.name,
            Checkpoint.copy_begun_at,
            is_sent.label("is_sent"),
        )
        .where(left)
        .order_by(Checkpoint.id)
        .limit(_AT_ONCE)
    )


def removed(checkpoint_id: str, noted: datetime) -> Executable:
    """Note that nothing of the copy of a checkpoint is left, unless another worker has begun one after `noted`."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.copy_begun_at == noted)
        .values(copy_begun_at=None, remote_at=None)
    )


def leave(runs: Select[str]) -> Insert:
    """Note that copies of `runs`, whose rows go in this transaction, have to follow.

    Where a worker may be sending one just now, only once that has noticed.
    """
    sent = case((Checkpoint.remote_at.is_(None), Checkpoint.copy_begun_at + _ABANDONED))
    copied = (
        select(Checkpoint.run_id, func.coalesce(func.max(sent), func.now()))
        .where(Checkpoint.run_id.in_(runs), Checkpoint.copy_begun_at.is_not(None))
        .group_by(Checkpoint.run_id)
    )
    return insert(CopyRemoval).from_select(["run_id", "not_before"], copied).on_conflict_do_nothing()


def runs_to_remove(after: str = "") -> Executable:
    """Deleted runs of whose copies something may be left; a few of them, with ids above `after`."""
    due = and_(CopyRemoval.not_before <= func.clock_timestamp(), CopyRemoval.run_id > after)
    return select(CopyRemoval.run_id.label("id")).where(due).order_by(CopyRemoval.run_id).limit(_AT_ONCE)


def run_removed(run_id: str) -> Executable:
    """Note that nothing of the copies of a deleted run is left."""
    return delete(CopyRemoval).where(CopyRemoval.run_id == run_id)
