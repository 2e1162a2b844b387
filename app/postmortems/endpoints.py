"""`/v1/runs/{run_id}/postmortem`."""

from fastapi import APIRouter

from app.dependencies import Session
from app.postmortems import service
from app.postmortems.schemas import PostMortem

router = APIRouter(prefix="/runs/{run_id}", tags=["runs"])


@router.get("/postmortem", responses={409: {"description": "Nothing of the run has gone wrong."}})
async def get_postmortem(run_id: str, session: Session) -> PostMortem:
    """Why a run failed, or its last attempt that went wrong: cause, memory, last lines, and what to change."""
    return await service.examine(session, run_id)
