"""Stored estimate of a run: computed once after creation, and compared with the measured resources."""

import logging

from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from anneal.contracts.schemas.estimates import KeptEstimate, Measured, RunEstimate, parse_stored
from anneal.contracts.schemas.runs.placement import Resources
from anneal.contracts.training_config.fields import TrainingConfig
from app.config import Settings
from app.infra.storage import Storage
from app.runs.creating.estimates import service
from app.runs.creating.estimates.history import measured_usage
from app.runs.creating.estimates.inputs import Subject, read_data
from app.runs.creating.plan import RunPlan
from app.tables.runs import Run, StoredEstimate

log = logging.getLogger(__name__)


async def estimate_and_store(
    sessions: async_sessionmaker[AsyncSession], settings: Settings, storage: Storage, run: Run
) -> None:
    """Estimate a new run and store the result, unless one is stored already; call it after the commit.

    Errors are logged and leave the run without an estimate: estimates are advisory and never fail a run.
    """
    if run.attempt:
        return
    try:
        async with sessions() as session:
            if await session.get(StoredEstimate, run.id) is not None:
                return
            data = await read_data(session, run.dataset_id)
        plan = RunPlan.derived_from(
            run,
            config=TrainingConfig.model_validate(run.config),
            user_set_fields=frozenset(run.user_set_fields),
            resources=Resources.model_validate(run.resources),
        )
        subject = Subject(plan, data, sharded=bool(run.requirements.get("sharded")))
        estimate, least, sharded = await service.estimate_new(sessions, settings, storage, subject)
        async with sessions() as session, session.begin():
            # The run may have been deleted in the meantime.
            still = select(Run.id).where(Run.id == run.id).with_for_update(read=True, key_share=True)
            if await session.scalar(still) is not None:
                await store_estimate(session, run.id, estimate)
                kind = run.requirements.get("kind")
                if least := {name: mb for name, mb in least.items() if kind in (None, name)}:
                    needs = run.requirements | {"estimated_mb": least} | ({"sharded": True} if sharded else {})
                    waits = update(Run).where(Run.id == run.id, Run.attempt == 0, Run.status == "pending")
                    await session.execute(waits.values(requirements=needs))
    except Exception:
        log.exception("estimate failed for run %s with base model %r", run.id, run.config.get("base_model"))


async def store_estimate(session: AsyncSession, run_id: str, estimate: RunEstimate) -> None:
    """Store the estimate of a run; an existing one is kept."""
    new = insert(StoredEstimate).values(run_id=run_id, estimate=estimate.model_dump(mode="json"))
    await session.execute(new.on_conflict_do_nothing())


async def read_estimate(session: AsyncSession, run_id: str) -> KeptEstimate | None:
    """Return the estimate stored at creation; None if there is none or another version stored a different form."""
    document = await session.scalar(select(StoredEstimate.estimate).where(StoredEstimate.run_id == run_id))
    return parse_stored(document) if document else None


async def estimate_and_measurements(
    session: AsyncSession, run: Run, step_seconds: float | None
) -> tuple[KeptEstimate | None, Measured | None]:
    """Return the estimate stored at creation and the measured resources so far; None where there are none."""
    expected = await read_estimate(session, run.id)
    peak, reserved, rate = await measured_usage(session, run.id) if run.attempt else (None, None, None)
    real = None
    if peak is not None or rate is not None:
        real = Measured(
            peak_memory_mb=peak, reserved_memory_mb=reserved, tokens_per_second=rate, step_seconds=step_seconds
        )
    return expected, real
