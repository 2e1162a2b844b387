"""Which checkpoints a run may resume from, and which it may let go."""

from typing import Any

from sqlalchemy import ColumnElement, Executable, Update, exists, func, select, update
from sqlalchemy.orm import aliased

from app.checkpoints.models import Checkpoint
from app.runs.models import Run


def good(run_id: str, below_step: int | None = None) -> Executable:
    """Checkpoints of a run that are there and not known to be damaged, furthest first."""
    kept = [Checkpoint.run_id == run_id, Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None)]
    if below_step is not None:
        kept.append(Checkpoint.step < below_step)
    return select(Checkpoint).where(*kept).order_by(Checkpoint.step.desc(), Checkpoint.id.desc())


def badness(one: Any) -> ColumnElement[float]:
    """By which checkpoints of a run are compared, the best lowest; null where no evaluation was of these weights."""
    # Runs are judged by the one or by the other.
    return func.coalesce(one.metrics["eval_loss"].as_float(), -one.metrics["eval_reward"].as_float())


def retire(run_id: str, keep: int) -> Executable:
    """Mark all but the `keep` newest checkpoints as deleted; the rows tell which folders to remove afterwards.

    Never the newest good one, the furthest one, the best of an evaluation (lowest loss, or highest reward), or a pinned
    one. Only a live run retires, and only a run that has ended can be resumed by another: nobody needs what goes here.
    """
    return _retire(run_id, keep).returning(Checkpoint.attempt, Checkpoint.name)


def _retire(run_id: str, keep: int) -> Update:
    one = aliased(Checkpoint)
    there = select(one.id).where(one.run_id == run_id, one.deleted_at.is_(None), one.bad_reason.is_(None))
    # An attempt may begin behind what an earlier one has saved, where that lies on another machine and has no copy.
    # What it saves itself is what its worker can go on from, however far the other is.
    newest = there.order_by(one.attempt.desc(), one.step.desc(), one.id.desc()).limit(max(keep, 1))
    # And the other is what `good` names first: a worker that has it goes on from there, until it has been overtaken.
    furthest = there.order_by(one.step.desc(), one.id.desc()).limit(1)
    best = there.where(badness(one).is_not(None)).order_by(badness(one), one.step).limit(1)
    return (
        update(Checkpoint)
        .where(
            Checkpoint.run_id == run_id,
            Checkpoint.deleted_at.is_(None),
            Checkpoint.id.not_in(newest),
            Checkpoint.id.not_in(furthest),
            Checkpoint.id.not_in(best),
            Checkpoint.pinned.is_(False),
        )
        .values(deleted_at=func.clock_timestamp())
    )


def retire_ended(run_id: str) -> Executable:
    """`retire` for a run that has ended: its newest, furthest and best stay, and whatever a later run went on from."""
    resumed = exists().where(Run.resume_checkpoint_id == Checkpoint.id)
    return _retire(run_id, 1).where(~resumed).returning(Checkpoint.attempt, Checkpoint.name, Checkpoint.bytes)


def retired(run_id: str) -> Executable:
    """Attempt and name of checkpoints whose folders may be left over from a kill between marking and removing."""
    return select(Checkpoint.attempt, Checkpoint.name).where(
        Checkpoint.run_id == run_id, Checkpoint.deleted_at.is_not(None)
    )


def mark_bad(checkpoint_id: str, reason: str, run_id: str, epoch: int) -> Executable:
    """The checkpoint failed its verification, by whoever holds the run in this epoch: nobody resumes from it again."""
    holds = exists().where(Run.id == run_id, Run.epoch == epoch)
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.bad_reason.is_(None), holds)
        .values(bad_reason=reason)
    )
