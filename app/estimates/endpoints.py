"""`/v1/runs/estimate`."""

from fastapi import APIRouter, BackgroundTasks, Request, Response

from app.audit import log as audit
from app.auth import CurrentCaller
from app.backends.registry import RULES
from app.dependencies import CurrentSettings, CurrentStorage, IdempotencyKey, Session
from app.errors import FieldError, invalid
from app.estimates import probing, service
from app.estimates.kept import store
from app.estimates.schemas import Estimated
from app.runs import service as runs
from app.runs import views
from app.runs.checks import examine, refusal
from app.runs.schemas import RunToEstimate

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
    if not body.probe:
        audit.forget(request)
    found = await examine(session, settings, storage, RULES, body)
    if found.errors or found.config is None:
        raise refusal(found.errors)
    if body.probe and not RULES[body.backend].loads_model:
        message = f"backend `{body.backend}` loads no model, so there is nothing to measure; leave `probe` out"
        raise invalid([FieldError(field="probe", code="not_supported", message=message)])
    data = await service.data_of(session, body.dataset_id)
    subject = service.Subject(found.config, found.given, body.backend, data)
    expected = await service.estimate(session, settings, storage, subject)
    if not body.probe:
        return Estimated(**dict(expected))
    idempotency = runs.Idempotency.of(idempotency_key, "/v1/runs/estimate", await request.body())
    around = runs.Surroundings(settings, storage, RULES)
    asked = probing.request_of(body)
    run = await runs.create(session, around, asked, caller.key_id, idempotency)
    await store(session, run.id, expected)
    after_commit.add_task(request.app.state.queue.hint)
    response.status_code = 202
    response.headers["Location"] = f"/v1/runs/{run.id}"
    told = await views.one(session, storage, run)
    return Estimated(**dict(told.estimate or expected), probe_run_id=run.id, measured=told.measured, probe=told.probe)
