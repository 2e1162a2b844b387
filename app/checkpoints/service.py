"""What can be done with checkpoints."""

from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, Select, func, select
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.ext.asyncio import AsyncSession

from app.checkpoints.models import Checkpoint
from app.errors import ApiError
from app.ids import is_id
from app.pagination import Paging, fetch


def _good() -> Select[Checkpoint]:
    return select(Checkpoint).where(Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None))


async def page(session: AsyncSession, run_id: str, paging: Paging) -> tuple[list[Checkpoint], bool]:
    """Checkpoints of a run whose files are there, newest first."""
    query = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.deleted_at.is_(None))
    return await fetch(session, query, Checkpoint.id, paging)


async def get(session: AsyncSession, run_id: str, checkpoint_id: str) -> Checkpoint:
    """A checkpoint of this run whose files are there; `checkpoint_not_found` otherwise."""
    found = await session.get(Checkpoint, checkpoint_id) if is_id(checkpoint_id, "ckpt") else None
    if found is None or found.run_id != run_id or found.deleted_at is not None:
        raise ApiError(
            404,
            "checkpoint_not_found",
            f"Run {run_id} has no checkpoint {checkpoint_id[:60]}; GET /v1/runs/{run_id}/checkpoints lists "
            "those it has.",
        )
    return found


async def pin(session: AsyncSession, run_id: str, checkpoint_id: str, pinned: bool) -> Checkpoint:
    """Keep a checkpoint from clean-up, or no longer."""
    # A clean-up may be marking it in this moment: what is going away cannot be pinned any more.
    query = select(Checkpoint).where(Checkpoint.id == checkpoint_id).execution_options(populate_existing=True)
    await session.execute(query.with_for_update())
    found = await get(session, run_id, checkpoint_id)
    found.pinned = pinned
    await session.flush()
    return found


def furthest_good_place(run_id: ColumnElement[str]) -> ScalarSelect[Any]:
    """`[step, attempt]` of the furthest checkpoint that a run can be resumed from, as a column of a query of runs."""
    place = array([Checkpoint.step, Checkpoint.attempt])
    good = (Checkpoint.deleted_at.is_(None), Checkpoint.bad_reason.is_(None))
    return select(func.max(place)).where(Checkpoint.run_id == run_id, *good).scalar_subquery()


async def furthest_good(session: AsyncSession, run_id: str, most_step: int | None = None) -> Checkpoint | None:
    """The furthest checkpoint of one run that can be resumed from, at or before `most_step`."""
    query = _good().where(Checkpoint.run_id == run_id)
    if most_step is not None:
        query = query.where(Checkpoint.step <= most_step)
    return await session.scalar(query.order_by(Checkpoint.step.desc(), Checkpoint.id.desc()).limit(1))
