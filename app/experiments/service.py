"""What can be done with experiments."""

from sqlalchemy import Select, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.errors import conflict, not_found
from app.experiments.models import Experiment
from app.experiments.schemas import BestRun, ExperimentCreate, ExperimentEdit
from app.ids import new_id
from app.pagination import Paging, fetch
from app.runs import removal
from app.runs.fields import TrainingStatus
from app.runs.listing import best_of
from app.runs.models import TERMINAL, Run

_NAMED = 3
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
    run = await best_of(session, experiment_id)
    if run is None or run.best_loss is None:
        return None
    return BestRun(run_id=run.id, name=run.name, best_loss=run.best_loss)


async def edit(session: AsyncSession, experiment_id: str, body: ExperimentEdit) -> Experiment:
    """Change name, description or tags; what was not given stays."""
    experiment = await _locked(session, experiment_id)
    for name, value in body.model_dump(exclude_none=True).items():
        setattr(experiment, name, value)
    await session.flush()
    return experiment


async def remove(session: AsyncSession, experiment_id: str) -> None:
    """Remove an experiment with its runs; 409 while one of them is live, pinned, or needed by a run elsewhere."""
    runs = select(Run.id).where(Run.experiment_id == experiment_id)
    # In the order in which a resume takes them: whoever resumes a run holds that run, then the experiment.
    await session.execute(runs.order_by(Run.id).with_for_update())
    experiment = await _locked(session, experiment_id)
    if live := await _some(session, runs.where(Run.status.not_in(TERMINAL))):
        raise conflict(
            "experiment_is_live", f"Experiment {experiment_id} has runs that have not ended: {live}; stop them first."
        )
    if pinned := await _some(session, runs.where(Run.pinned)):
        raise conflict(
            "run_is_pinned", f"Experiment {experiment_id} has pinned runs: {pinned}; unpin or move on without them."
        )
    if needing := await _some(session, removal.needing(runs)):
        raise conflict(
            "run_is_needed",
            f"Runs of other experiments went on from those of {experiment_id}, or build on them: {needing}; "
            "delete these first.",
        )
    await removal.drop(session, runs)
    await session.delete(experiment)


async def _locked(session: AsyncSession, experiment_id: str) -> Experiment:
    query = select(Experiment).where(Experiment.id == experiment_id).execution_options(populate_existing=True)
    experiment = await session.scalar(query.with_for_update())
    if experiment is None:
        raise not_found("experiment", experiment_id)
    return experiment


async def _some(session: AsyncSession, ids: Select[str]) -> str:
    """The first few, for a sentence."""
    return ", ".join((await session.scalars(ids.limit(_NAMED))).all())
