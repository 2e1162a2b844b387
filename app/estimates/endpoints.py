"""`/v1/runs/estimate`."""

from fastapi import APIRouter, BackgroundTasks, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import log as audit
from app.auth import CurrentCaller
from app.backends.registry import RULES
from app.config import Settings
from app.dependencies import CurrentSettings, CurrentStorage, IdempotencyKey, Session
from app.errors import FieldError, invalid
from app.estimates import kept, probing, service
from app.estimates.schemas import Estimated, KeptEstimate
from app.runs import service as runs
from app.runs import views
from app.runs.checks import examine, refusal
from app.runs.schemas import RunToEstimate
from app.storage import Storage

router = APIRouter(prefix="/runs", tags=["runs"])


@router.post(
    "/estimate",
    responses={202: {"model": Estimated, "description": "With `probe`: a run that measures waits for a worker."}},
)
async def estimate_run(
    body: RunToEstimate,
    request: Request,
    response: Response,
    session: Session,
    settings: CurrentSettings,
    storage: CurrentStorage,
    caller: CurrentCaller,
    after_commit: BackgroundTasks,
    idempotency_key: IdempotencyKey = None,
) -> Estimated:
    """Say what a run would take in memory, steps, tokens, time and money, and where it fits, without making it.

    With `probe` a short run measures it too: two steps on the longest rows, of which nothing is kept. It waits for a
    worker like any other.
    """
    idempotency = None
    if body.probe:
        idempotency = runs.Idempotency.of(idempotency_key, "/v1/runs/estimate", await request.body())
    else:
        audit.forget(request)
    sessions, expected = request.app.state.sessions, None
    # Sessions of their own, which end here: no row stays locked, and no connection taken, while all is computed.
    async with sessions() as reading:
        if earlier := await runs.replayed(reading, caller.key_id, idempotency):
            expected = await kept.of(reading, earlier.id)
    if expected is None:
        async with sessions() as reading:
            subject = await _subject(reading, settings, storage, body)
        told, config = await service.estimate(sessions, settings, storage, subject), subject.config
        if not body.probe:
            return Estimated(**dict(told))
        expected = KeptEstimate(**dict(told), eval_split=config.eval_split, stop_at_step=config.stop_at_step)
    around = runs.Surroundings(settings, storage, RULES)
    run = await runs.create(session, around, probing.request_of(body), caller.key_id, idempotency)
    await kept.store(session, run.id, expected)
    after_commit.add_task(request.app.state.queue.hint)
    response.status_code = 202
    response.headers["Location"] = f"/v1/runs/{run.id}"
    shown = await views.one(session, storage, run)
    return Estimated(**dict(expected), probe_run_id=run.id, measured=shown.measured, probe=shown.probe)


async def _subject(session: AsyncSession, settings: Settings, storage: Storage, body: RunToEstimate) -> service.Subject:
    # To know what it takes before its weights are downloaded is what an estimate is for; a probe loads them.
    found = await examine(session, settings, storage, RULES, body, needs_weights=body.probe)
    if found.errors or found.config is None:
        raise refusal(found.errors)
    if body.probe and not RULES[body.backend].loads_model:
        message = f"backend `{body.backend}` loads no model, so there is nothing to measure; leave `probe` out"
        raise invalid([FieldError(field="probe", code="not_supported", message=message)])
    data = await service.data_of(session, body.dataset_id)
    return service.Subject(found.config, found.given, body.backend, data, RULES[body.backend].loads_model)
