"""What can be done with checkpoints."""

from collections.abc import Sequence

from sqlalchemy import Select, Text, bindparam, func, select
from sqlalchemy.dialects.postgresql import ARRAY
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
    found = await get(session, run_id, checkpoint_id)
    # A clean-up may have marked it in this moment: what is going away cannot be pinned any more.
    await session.refresh(found, with_for_update=True)
    found = await get(session, run_id, checkpoint_id)
    found.pinned = pinned
    await session.flush()
    return found


_FURTHEST_OF_EACH = (
    select(*Checkpoint.__table__.c["run_id", "attempt", "step"])
    .where(
        Checkpoint.deleted_at.is_(None),
        Checkpoint.bad_reason.is_(None),
        # One array: as many parameters as there are runs would take longer to write down than the query.
        Checkpoint.run_id == func.any(bindparam("run_ids", type_=ARRAY(Text))),
    )
    .distinct(Checkpoint.run_id)
    .order_by(Checkpoint.run_id, Checkpoint.step.desc(), Checkpoint.id.desc())
)


async def furthest_good_of_each(session: AsyncSession, run_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Attempt and step of the furthest checkpoint that can be resumed from, for each of the runs that has one."""
    found = await session.execute(_FURTHEST_OF_EACH, {"run_ids": list(run_ids)})
    return {run_id: (attempt, step) for run_id, attempt, step in found.all()}


async def furthest_good(session: AsyncSession, run_id: str, most_step: int | None = None) -> Checkpoint | None:
    """The furthest checkpoint of one run that can be resumed from, at or before `most_step`."""
    query = _good().where(Checkpoint.run_id == run_id)
    if most_step is not None:
        query = query.where(Checkpoint.step <= most_step)
    return await session.scalar(query.order_by(Checkpoint.step.desc(), Checkpoint.id.desc()).limit(1))
