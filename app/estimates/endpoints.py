"""`/v1/runs/estimate`."""

from fastapi import APIRouter

from app.backends.registry import RULES
from app.dependencies import CurrentSettings, CurrentStorage, Session
from app.estimates import service
from app.estimates.schemas import RunEstimate
from app.runs.checks import examine, refusal
from app.runs.schemas import RunCreate

router = APIRouter(prefix="/runs", tags=["runs"])


@router.post("/estimate")
async def estimate_run(
    body: RunCreate, session: Session, settings: CurrentSettings, storage: CurrentStorage
) -> RunEstimate:
    """Say what a run would take in memory, steps, tokens, time and money, and where it fits, without making it."""
    found = await examine(session, settings, storage, RULES, body)
    if found.errors or found.config is None:
        raise refusal(found.errors)
    data = await service.data_of(session, body.dataset_id)
    subject = service.Subject(found.config, found.given, body.backend, data)
    return await service.estimate(session, settings, storage, subject)
