"""Endpoint `/v1/runs/{run_id}/postmortem`."""

from fastapi import APIRouter

from anneal.contracts.schemas.postmortem import PostMortem
from app.api.dependencies import Session
from app.runs.reading.postmortem import service

router = APIRouter(prefix="/runs/{run_id}", tags=["runs"])


@router.get("/postmortem", responses={409: {"description": "The run and its attempts had no failure."}})
async def get_postmortem(run_id: str, session: Session) -> PostMortem:
    """Explain why a run or its last unsuccessful attempt failed: cause, memory, last lines, advised changes."""
    return await service.examine_run(session, run_id)
