"""Which checkpoints a run may resume from, and which it may let go."""

from sqlalchemy import Executable, func, select, update
from sqlalchemy.orm import aliased

from app.checkpoints.models import Checkpoint
from app.runs.models import TERMINAL, Run


def good(run_id: str, below_step: int | None = None) -> Executable:
    """Checkpoints of a run that are there and not known to be damaged, furthest first."""
    kept = [Checkpoint.run_id == run_id, Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None)]
    if below_step is not None:
        kept.append(Checkpoint.step < below_step)
    return select(Checkpoint).where(*kept).order_by(Checkpoint.step.desc(), Checkpoint.id.desc())


def retire(run_id: str, keep: int) -> Executable:
    """Mark all but the `keep` furthest checkpoints as deleted; the rows tell which folders to remove afterwards.

    Never the newest good one, a pinned or best one, or one that an unfinished run resumes from.
    """
    newest = aliased(Checkpoint)
    furthest = (
        select(newest.id)
        .where(newest.run_id == run_id, newest.deleted_at.is_(None), newest.bad_reason.is_(None))
        .order_by(newest.step.desc(), newest.id.desc())
        .limit(max(keep, 1))
    )
    in_use = select(Run.id).where(Run.resume_checkpoint_id == Checkpoint.id, Run.status.not_in(TERMINAL)).exists()
    return (
        update(Checkpoint)
        .where(
            Checkpoint.run_id == run_id,
            Checkpoint.deleted_at.is_(None),
            Checkpoint.id.not_in(furthest),
            Checkpoint.pinned.is_(False),
            Checkpoint.kind.not_in(["best", "final"]),
            ~in_use,
        )
        .values(deleted_at=func.clock_timestamp())
        .returning(Checkpoint.attempt, Checkpoint.name)
    )


def mark_bad(checkpoint_id: str, reason: str) -> Executable:
    """The checkpoint failed its verification: nobody resumes from it again."""
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.bad_reason.is_(None))
        .values(bad_reason=reason)
    )
