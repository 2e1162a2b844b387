"""Endpoint `/v1/runs/estimate`."""

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession

from app.audit import log as audit
from app.errors import FieldError, invalid
from app.estimates import kept, probing, service
from app.estimates.schemas import Estimated, KeptEstimate
from app.runs import service as runs
from app.runs import views
from app.runs.checks import examine, refusal
from app.runs.making import NewRun
from app.runs.schemas import RunToEstimate

router = APIRouter(prefix="/runs", tags=["runs"])


@router.post(
    "/estimate",
    responses={202: {"model": Estimated, "description": "With `probe`: a probe run was queued."}},
)
async def estimate_run(body: RunToEstimate, new: NewRun) -> Estimated:
    """Estimate memory, steps, tokens, time and cost of a run, and the devices it fits on, without creating it.

    With `probe`, a short run also measures it: two steps on the longest rows, of which nothing is kept. The probe is
    queued like any other run.
    """
    idempotency = None
    if body.probe:
        idempotency = await new.idempotency("/v1/runs/estimate")
    else:
        audit.forget(new.request)
    sessions, expected = new.request.app.state.sessions, None
    # Separate short sessions, so that no row stays locked and no connection in use during the computation.
    async with sessions() as reading:
        if earlier := await runs.replayed(reading, new.caller_id, idempotency):
            expected = await kept.of(reading, earlier.id)
    if expected is None:
        async with sessions() as reading:
            subject = await _subject(reading, new.around, body)
        computed = await service.estimate(sessions, new.around.settings, new.around.storage, subject)
        if not body.probe:
            return Estimated(**dict(computed))
        config = subject.config
        expected = KeptEstimate(**dict(computed), eval_split=config.eval_split, stop_at_step=config.stop_at_step)
    run = await runs.create(new.session, new.around, probing.request_of(body), new.caller_id, idempotency)
    await kept.store(new.session, run.id, expected)
    new.accept(run)
    shown = await views.one(new.session, new.around.storage, run)
    return Estimated(**dict(expected), probe_run_id=run.id, measured=shown.measured, probe=shown.probe)


async def _subject(session: AsyncSession, around: runs.Surroundings, body: RunToEstimate) -> service.Subject:
    # An estimate must work before the weights are downloaded; a probe loads them.
    found = await examine(session, around.settings, around.storage, around.rules, body, needs_weights=body.probe)
    if found.errors or found.config is None:
        raise refusal(found.errors)
    rules = around.rules[body.backend]
    if body.probe and not rules.loads_model:
        message = f"backend `{body.backend}` loads no model, so there is nothing to measure; omit `probe`"
        raise invalid([FieldError(field="probe", code="not_supported", message=message)])
    data = await service.data_of(session, body.dataset_id)
    return service.Subject(found.config, found.given, body.backend, data, rules.loads_model)
