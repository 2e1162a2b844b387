"""Second copies of checkpoints at `ANNEAL_CHECKPOINT_URL`: statements by which workers make and remove them."""

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Executable, and_, delete, func, or_, select, update

from app.checkpoints.models import Checkpoint, CopyRemoval
from app.runs.models import TERMINAL, Run

_AT_ONCE = 100
_OVERDUE = timedelta(minutes=1)
_ABANDONED = timedelta(minutes=10)
_LOOK_BACK = timedelta(days=1)
_WANTED = and_(Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None), Checkpoint.remote_at.is_(None))


def _free() -> ColumnElement[bool]:
    long_ago = func.clock_timestamp() - _ABANDONED
    return or_(Checkpoint.copy_begun_at.is_(None), Checkpoint.copy_begun_at < long_ago)


def begin(checkpoint_id: str, is_mine: bool) -> Executable:
    """Note that something of a copy is there from now on; no row where none is wanted, or another worker is at it.

    To be repeated at least every few minutes (`is_mine`), or another worker takes it for abandoned.
    """
    free = [] if is_mine else [_free()]
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, _WANTED, *free)
        .values(copy_begun_at=func.clock_timestamp())
        .returning(Checkpoint.id)
    )


def complete(checkpoint_id: str) -> Executable:
    """Note that the copy is whole; no row where the checkpoint has been let go meanwhile."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.deleted_at.is_(None))
        .values(remote_at=func.clock_timestamp())
        .returning(Checkpoint.id)
    )


def spoilt(checkpoint_id: str, remote_at: datetime) -> Executable:
    """Note that the copy which was whole at `remote_at` is none any more, so that whoever can sends it again."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.remote_at == remote_at)
        .values(remote_at=None)
    )


def overdue() -> Executable:
    """Checkpoints of live and just ended runs that nobody copies, newest first: their worker is gone, or behind."""
    recent = or_(Run.status.not_in(TERMINAL), Run.finished_at > func.clock_timestamp() - _LOOK_BACK)
    late = Checkpoint.created_at < func.clock_timestamp() - _OVERDUE
    columns = (Checkpoint.id, Checkpoint.run_id, Checkpoint.attempt, Checkpoint.name, Checkpoint.manifest_sha256)
    query = select(*columns).join(Run, Run.id == Checkpoint.run_id).where(_WANTED, _free(), recent, late)
    return query.order_by(Checkpoint.id.desc()).limit(_AT_ONCE)


def to_remove() -> Executable:
    """Checkpoints that were let go, and of whose copies something is left."""
    left = and_(Checkpoint.deleted_at.is_not(None), Checkpoint.copy_begun_at.is_not(None))
    columns = (Checkpoint.id, Checkpoint.run_id, Checkpoint.attempt, Checkpoint.name)
    return select(*columns).where(left).order_by(Checkpoint.id).limit(_AT_ONCE)


def removed(checkpoint_id: str) -> Executable:
    """Note that nothing of the copy of a checkpoint is left."""
    return update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(copy_begun_at=None, remote_at=None)


def runs_to_remove() -> Executable:
    """Deleted runs of whose copies something may be left."""
    return select(CopyRemoval.run_id).order_by(CopyRemoval.run_id).limit(_AT_ONCE)


def run_removed(run_id: str) -> Executable:
    """Note that nothing of the copies of a deleted run is left."""
    return delete(CopyRemoval).where(CopyRemoval.run_id == run_id)
