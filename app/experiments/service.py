"""Operations on experiments."""

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.field_types import changed_fields
from anneal.contracts.methods import METHODS, TrainingMethod
from anneal.contracts.run_status import TERMINAL, TrainingStatus
from anneal.contracts.schemas.experiments import BestRun, ExperimentContents, ExperimentCreate, ExperimentEdit
from app.api.errors import conflict, not_found
from app.api.pagination import Paging, fetch_page, found_by, search_condition
from app.infra.ids import new_id
from app.runs.reading.queries import best_of
from app.runs.state import deletion
from app.runs.state.service import lock_runs
from app.tables.checkpoints import Checkpoint
from app.tables.experiments import Experiment
from app.tables.runs import Run


async def create_experiment(session: AsyncSession, body: ExperimentCreate, created_by: str | None) -> Experiment:
    """Create an experiment."""
    experiment = Experiment(id=new_id("exp"), created_by=created_by, **body.model_dump())
    session.add(experiment)
    await session.flush()
    await session.refresh(experiment)
    return experiment


async def get_experiment(session: AsyncSession, experiment_id: str) -> Experiment:
    """Return an experiment; raise 404 `experiment_not_found` if it does not exist."""
    experiment = await session.get(Experiment, experiment_id)
    if experiment is None:
        raise not_found("experiment", experiment_id)
    return experiment


async def list_experiments(
    session: AsyncSession, paging: Paging, find: str | None = None, search: str | None = None
) -> tuple[list[Experiment], bool]:
    """Return a page of experiments, newest first; `find` names one, `search` is a part of name, tag or id."""
    query = select(Experiment)
    if find is not None:
        query = query.where(found_by(find, "exp", Experiment.id, Experiment.name))
    if search is not None:
        query = query.where(search_condition(search, "exp", Experiment.id, Experiment.name, Experiment.tags))
    return await fetch_page(session, query, Experiment.id, paging)


async def count_contents(session: AsyncSession, experiment_id: str) -> ExperimentContents:
    """Count the runs of an experiment by status, including zeros, their checkpoints and their models."""
    inside = Run.experiment_id == experiment_id
    query = select(Run.status, func.count(), func.count(Run.output_attempt)).where(inside).group_by(Run.status)
    counts = {status: (runs, models) for status, runs, models in (await session.execute(query)).tuples()}
    saved = select(func.count(Checkpoint.id)).join(Run, Run.id == Checkpoint.run_id)
    return ExperimentContents(
        runs={status: counts.get(status.value, (0, 0))[0] for status in TrainingStatus},
        checkpoints=await session.scalar(saved.where(inside, Checkpoint.deleted_at.is_(None))) or 0,
        models=sum(models for _, models in counts.values()),
    )


async def best_runs(session: AsyncSession, experiment_id: str) -> list[BestRun]:
    """Return the best run of each method, by its evaluations if there are any; on a tie, the older one."""
    best = []
    for run in await best_of(session, experiment_id):
        method = METHODS[TrainingMethod(run.method)]
        result: dict[str, Any] = {"metric": "loss", "value": run.best_loss}
        if run.best_score is not None:
            result = {"metric": method.eval_metric, "value": method.to_score(run.best_score)}
        best.append(BestRun(run_id=run.id, name=run.name, method=method.name, **result))
    return best


async def edit_experiment(session: AsyncSession, experiment_id: str, body: ExperimentEdit) -> Experiment:
    """Change name, description, tags or the quota of devices; omitted fields stay unchanged."""
    experiment = await _lock_experiment(session, experiment_id)
    for name, value in changed_fields(body).items():
        setattr(experiment, name, value)
    await session.flush()
    return experiment


async def remove_experiment(session: AsyncSession, experiment_id: str, *, cascade: bool) -> None:
    """Delete an experiment, and its runs with `cascade`.

    Raises 409 if it has runs and `cascade` is false, or if one of them is live, needed by a run outside it, pinned, or
    has a pinned checkpoint.
    """
    runs = select(Run.id).where(Run.experiment_id == experiment_id)
    # Same lock order as a resume, which locks the run and then the experiment.
    await lock_runs(session, runs)
    experiment = await _lock_experiment(session, experiment_id)
    held = await count_contents(session, experiment_id)
    if not held.is_empty and not cascade:
        raise conflict(
            "experiment_not_empty",
            f"Experiment {experiment_id} contains {held.as_sentence()}. To delete all of that too, "
            "use `?cascade=true`.",
        )
    if live := await deletion.first_few(session, runs.where(Run.status.not_in(TERMINAL))):
        raise conflict(
            "experiment_is_live", f"Experiment {experiment_id} has runs that have not ended: {live}. Stop them first."
        )
    if pinned := await deletion.first_few(session, runs.where(Run.pinned)):
        raise conflict(
            "run_is_pinned", f"Experiment {experiment_id} has pinned runs: {pinned}. Unpin them, or keep it."
        )
    if pinned := await deletion.first_few(session, deletion.pinned_checkpoints(runs)):
        raise conflict(
            "checkpoint_is_pinned",
            f"Runs of experiment {experiment_id} have pinned checkpoints: {pinned}. Unpin them, or keep it.",
        )
    if needing := await deletion.first_few(session, deletion.select_dependents(runs)):
        raise conflict(
            "run_is_needed",
            f"Runs of other experiments were resumed from runs of {experiment_id}, or use their output: {needing}. "
            "Delete those runs first.",
        )
    await deletion.delete_rows(session, runs)
    await session.delete(experiment)


async def _lock_experiment(session: AsyncSession, experiment_id: str) -> Experiment:
    query = select(Experiment).where(Experiment.id == experiment_id).execution_options(populate_existing=True)
    experiment = await session.scalar(query.with_for_update())
    if experiment is None:
        raise not_found("experiment", experiment_id)
    return experiment
