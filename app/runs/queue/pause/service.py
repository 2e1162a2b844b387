"""Pause of the queue: set and lifted by an admin, applied by `app.runs.queue.policy` and by claims."""

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.run_status import LIVE
from anneal.contracts.schemas.runs.queue import PauseRead, QueueRead
from app.runs.queue.fleet import read_pause
from app.runs.queue.holds_table import take_turn
from app.tables.runs import Run
from app.tables.scheduling import QueuePause


async def read_queue(session: AsyncSession) -> QueueRead:
    """Return the pause of the queue, and how many runs wait and train."""
    pause = await read_pause(session)
    pending = await session.scalar(select(func.count()).where(Run.status == "pending"))
    live = await session.scalar(select(func.count()).where(Run.status.in_(LIVE)))
    return QueueRead(
        paused=pause is not None,
        pause=None if pause is None else PauseRead.model_validate(pause),
        pending=pending or 0,
        live=live or 0,
    )


async def pause_queue(session: AsyncSession, paused_by: str, reason: str | None) -> None:
    """Pause the queue, or change who has paused it and why; once this has committed, no run starts."""
    # Claims that have read the queue before the pause end first.
    await (await session.connection()).run_sync(take_turn)
    row = {"paused_by": paused_by, "reason": reason, "paused_at": func.clock_timestamp()}
    pause = insert(QueuePause).values(**row)
    await session.execute(pause.on_conflict_do_update(index_elements=[QueuePause.id], set_=row))


async def resume_queue(session: AsyncSession) -> None:
    """Let runs start again."""
    await session.execute(delete(QueuePause))
