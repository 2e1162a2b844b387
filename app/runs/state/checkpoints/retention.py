"""Checkpoint retention: selects restorable checkpoints and marks those to delete."""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, Update, exists, func, select, update
from sqlalchemy.orm import aliased

from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run


def select_restorable(run_id: str, below_step: int | None = None) -> Executable:
    """Select the restorable checkpoints of a run (not deleted, not known to be corrupt), furthest first."""
    conditions = [Checkpoint.run_id == run_id, Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None)]
    if below_step is not None:
        conditions.append(Checkpoint.step < below_step)
    return select(Checkpoint).where(*conditions).order_by(Checkpoint.step.desc(), Checkpoint.id.desc())


def eval_score(checkpoint: Any) -> ColumnElement[float]:
    """Return the evaluation score of a checkpoint, lower is better; null if these weights were not evaluated."""
    # A run has either losses or rewards.
    return func.coalesce(checkpoint.metrics["eval_loss"].as_float(), -checkpoint.metrics["eval_reward"].as_float())


def retire_checkpoints(connection: Connection, run_id: str, keep: int) -> list[tuple[int, str]]:
    """Mark all but the `keep` newest checkpoints as deleted; return attempt and name of each.

    Their folders must be removed after the commit.

    Keeps the newest restorable one, the furthest one, the one with the best evaluation (lowest loss or highest reward),
    pinned ones, and those that another run resumes or evaluates.
    """
    # A request to evaluate a checkpoint of a live run keeps it locked: wait, and then see the run that evaluates it.
    # One statement would not, since it sees what was there when it began.
    there = select(Checkpoint.id).where(Checkpoint.run_id == run_id, Checkpoint.deleted_at.is_(None))
    connection.execute(there.order_by(Checkpoint.id).with_for_update(key_share=True)).all()
    gone = connection.execute(_mark_retired(run_id, keep).returning(Checkpoint.attempt, Checkpoint.name))
    return [(attempt, name) for attempt, name in gone]


def _mark_retired(run_id: str, keep: int) -> Update:
    candidate = aliased(Checkpoint)
    there = select(candidate.id).where(
        candidate.run_id == run_id, candidate.deleted_at.is_(None), candidate.bad_reason.is_(None)
    )
    # An attempt may start before the furthest saved step: that one may be on another machine that has not sent it.
    # Its worker can then resume only from checkpoints that this attempt saves, so the newest is kept.
    newest = there.order_by(candidate.attempt.desc(), candidate.step.desc(), candidate.id.desc()).limit(max(keep, 1))
    # The furthest is kept as well: `select_restorable` returns it first, and a worker that has it resumes from it.
    furthest = there.order_by(candidate.step.desc(), candidate.id.desc()).limit(1)
    used = exists().where(Run.resume_checkpoint_id == Checkpoint.id)
    best = there.where(eval_score(candidate).is_not(None)).order_by(eval_score(candidate), candidate.step).limit(1)
    return (
        update(Checkpoint)
        .where(
            Checkpoint.run_id == run_id,
            Checkpoint.deleted_at.is_(None),
            Checkpoint.id.not_in(newest),
            Checkpoint.id.not_in(furthest),
            Checkpoint.id.not_in(best),
            Checkpoint.pinned.is_(False),
            ~used,
        )
        .values(deleted_at=func.clock_timestamp())
    )


def retire_ended(run_id: str) -> Executable:
    """Do the same as `retire_checkpoints` for an ended run, of which one checkpoint is enough."""
    return _mark_retired(run_id, 1).returning(Checkpoint.attempt, Checkpoint.name, Checkpoint.bytes)


def select_retired(run_id: str) -> Executable:
    """Select attempt and name of deleted checkpoints; a crash between marking and removal may leave their folders."""
    return select(Checkpoint.attempt, Checkpoint.name).where(
        Checkpoint.run_id == run_id, Checkpoint.deleted_at.is_not(None)
    )


def mark_corrupt(checkpoint_id: str, reason: str, run_id: str, lease_epoch: int) -> Executable:
    """Mark a checkpoint that failed verification as corrupt, so that no run resumes from it again.

    Does nothing unless the caller holds the run in this lease epoch.
    """
    holds = exists().where(Run.id == run_id, Run.lease_epoch == lease_epoch)
    return (
        update(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, Checkpoint.bad_reason.is_(None), holds)
        .values(bad_reason=reason)
    )
