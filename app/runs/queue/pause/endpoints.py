"""Endpoints `/v1/queue`: what waits, and the pause of the whole queue."""

from fastapi import APIRouter, BackgroundTasks, Request

from anneal.contracts.schemas.runs.queue import QueuePauseRequest, QueueRead
from app.api.authorization import AdminOnly, CurrentCaller
from app.api.dependencies import Session
from app.runs.queue.pause import service

router = APIRouter(prefix="/queue", tags=["queue"])

_MOST_HINTS = 100


@router.get("")
async def get_queue(session: Session) -> QueueRead:
    """Get the number of runs that wait and that train, and the pause of the queue."""
    return await service.read_queue(session)


@router.post("/pause", dependencies=[AdminOnly])
async def pause_queue(body: QueuePauseRequest, session: Session, caller: CurrentCaller) -> QueueRead:
    """Pause the queue: no run starts until it is resumed. Runs that train go on; one that is requeued waits too.

    Pausing a paused queue replaces who has paused it, when and why.
    """
    await service.pause_queue(session, caller.name, body.reason)
    return await service.read_queue(session)


@router.post("/resume", dependencies=[AdminOnly])
async def resume_queue(session: Session, request: Request, after_commit: BackgroundTasks) -> QueueRead:
    """Resume the queue: pending runs start in their order. Resuming a queue that is not paused changes nothing."""
    await service.resume_queue(session)
    queue = await service.read_queue(session)
    after_commit.add_task(request.app.state.queue.wake_workers, min(queue.pending, _MOST_HINTS))
    return queue
