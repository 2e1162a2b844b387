"""Queries and operations on checkpoints."""

from typing import Any

from sqlalchemy import ColumnElement, Double, Integer, Select, and_, case, cast, func, select
from sqlalchemy.dialects.postgresql import ARRAY, array
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.errors import ApiError
from app.api.pagination import Paging, fetch_page
from app.infra.ids import is_id
from app.runs.state.checkpoints.retention import eval_score
from app.runs.state.service import lock_run
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run

_BADNESS = eval_score(Checkpoint)
_LAST_SAVES = 5


def _select_good() -> Select[Checkpoint]:
    return select(Checkpoint).where(Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None))


async def list_checkpoints(session: AsyncSession, run_id: str, paging: Paging) -> tuple[list[Checkpoint], bool]:
    """Return a page of a run's checkpoints whose files exist, newest first."""
    query = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.deleted_at.is_(None))
    return await fetch_page(session, query, Checkpoint.id, paging)


async def get_checkpoint(session: AsyncSession, run_id: str, checkpoint_id: str) -> Checkpoint:
    """Return a checkpoint of this run whose files exist; raise 404 `checkpoint_not_found` otherwise."""
    checkpoint = await session.get(Checkpoint, checkpoint_id) if is_id(checkpoint_id, "ckpt") else None
    if checkpoint is None or checkpoint.run_id != run_id or checkpoint.deleted_at is not None:
        raise ApiError(
            404,
            "checkpoint_not_found",
            f"Run {run_id} has no checkpoint {checkpoint_id[:60]}; list its checkpoints with "
            f"GET /v1/runs/{run_id}/checkpoints.",
        )
    return checkpoint


async def pin_checkpoint(session: AsyncSession, run_id: str, checkpoint_id: str, pinned: bool) -> Checkpoint:
    """Set or clear a checkpoint's pin, which protects it from retention, and its run from deletion."""
    # Lock the run, which a concurrent request may be deleting, and the row: retention may be marking it now.
    await lock_run(session, run_id, for_child=True)
    query = select(Checkpoint).where(Checkpoint.id == checkpoint_id).execution_options(populate_existing=True)
    await session.execute(query.with_for_update())
    checkpoint = await get_checkpoint(session, run_id, checkpoint_id)
    checkpoint.pinned = pinned
    await session.flush()
    return checkpoint


def preferred_place(run: Any) -> ColumnElement[Any]:
    """Return `[step, attempt]` of the one that `preferred_checkpoint` selects, as a column of a query on `run`."""
    place = array([Checkpoint.step, Checkpoint.attempt])
    good = (Checkpoint.run_id == run.id, Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None))
    furthest = select(func.max(place)).where(*good).scalar_subquery()
    judged = array([_BADNESS, cast(Checkpoint.step, Double), cast(Checkpoint.attempt, Double)])
    lowest = cast(func.min(judged, type_=ARRAY(Double))[2:3], ARRAY(Integer))
    best = select(lowest).where(*good, _BADNESS.is_not(None)).scalar_subquery()
    is_best = and_(run.stop_mode == "best", run.status.not_in(("completed", "failed")))
    return case((is_best, func.coalesce(best, furthest)), else_=furthest)


async def preferred_checkpoint(session: AsyncSession, run: Run) -> Checkpoint | None:
    """Return the default checkpoint for resuming a run: the furthest restorable one.

    For a run that was stopped with mode `best`, it is the one with the best evaluation.
    """
    if run.stop_mode == "best" and run.status not in ("completed", "failed"):
        best = await best_good(session, run.id)
        if best is not None:
            return best
    return await furthest_good(session, run.id)


async def best_good(session: AsyncSession, run_id: str) -> Checkpoint | None:
    """Return the restorable checkpoint with the lowest evaluation loss or highest reward; the earlier one on a tie."""
    query = _select_good().where(Checkpoint.run_id == run_id, _BADNESS.is_not(None))
    return await session.scalar(query.order_by(_BADNESS, Checkpoint.step).limit(1))


async def slowest_save(session: AsyncSession, run_id: str) -> float | None:
    """Return the duration in seconds of the slowest of the run's last saves; None if it has none."""
    last = select(Checkpoint.save_seconds).where(Checkpoint.run_id == run_id, Checkpoint.save_seconds.is_not(None))
    seconds: float | None = await session.scalar(
        select(func.max(last.order_by(Checkpoint.id.desc()).limit(_LAST_SAVES).subquery().c.save_seconds))
    )
    return seconds


async def furthest_good(session: AsyncSession, run_id: str, most_step: int | None = None) -> Checkpoint | None:
    """Return the furthest restorable checkpoint of a run, at or before `most_step`."""
    query = _select_good().where(Checkpoint.run_id == run_id)
    if most_step is not None:
        query = query.where(Checkpoint.step <= most_step)
    return await session.scalar(query.order_by(Checkpoint.step.desc(), Checkpoint.id.desc()).limit(1))
