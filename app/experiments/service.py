"""What can be done with experiments."""

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.errors import not_found
from app.experiments.models import Experiment
from app.experiments.schemas import BestRun, ExperimentCreate
from app.ids import new_id
from app.pagination import Paging, fetch
from app.runs.fields import TrainingStatus
from app.runs.models import Run

DEFAULT_ID = "exp_" + "0" * 26
"""The experiment of runs that name none: a fixed id, so that two first runs at once make only one."""


async def create(session: AsyncSession, body: ExperimentCreate, created_by: str | None) -> Experiment:
    """A new experiment."""
    experiment = Experiment(id=new_id("exp"), created_by=created_by, **body.model_dump())
    session.add(experiment)
    await session.flush()
    await session.refresh(experiment)
    return experiment


async def get(session: AsyncSession, experiment_id: str) -> Experiment:
    """The experiment; `experiment_not_found` where there is none."""
    experiment = await session.get(Experiment, experiment_id)
    if experiment is None:
        raise not_found("experiment", experiment_id)
    return experiment


async def page(session: AsyncSession, paging: Paging) -> tuple[list[Experiment], bool]:
    """Experiments, newest first."""
    return await fetch(session, select(Experiment), Experiment.id, paging)


async def default(session: AsyncSession, created_by: str | None) -> Experiment:
    """The experiment of runs that name none, made by the first of them."""
    found = await session.get(Experiment, DEFAULT_ID)
    if found is not None:
        return found
    made = insert(Experiment).values(id=DEFAULT_ID, name="default", created_by=created_by)
    await session.execute(made.on_conflict_do_nothing(index_elements=[Experiment.id]))
    return await get(session, DEFAULT_ID)


async def count_runs(session: AsyncSession, experiment_id: str) -> dict[TrainingStatus, int]:
    """How many runs of an experiment have each status, zeros included."""
    query = select(Run.status, func.count()).where(Run.experiment_id == experiment_id).group_by(Run.status)
    found = {row[0]: row[1] for row in (await session.execute(query)).all()}
    return {status: found.get(status.value, 0) for status in TrainingStatus}


async def best_run(session: AsyncSession, experiment_id: str) -> BestRun | None:
    """The run with the lowest loss; the older one of two equals."""
    query = (
        select(Run.id, Run.name, Run.best_loss)
        .where(Run.experiment_id == experiment_id, Run.best_loss.is_not(None))
        .order_by(Run.best_loss, Run.id)
        .limit(1)
    )
    row = (await session.execute(query)).one_or_none()
    return None if row is None else BestRun(run_id=row.id, name=row.name, best_loss=row.best_loss)
