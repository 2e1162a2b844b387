"""Comparison of runs."""

from collections.abc import Sequence, Set
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import METHODS, TrainingMethod
from anneal.contracts.run_status import TrainingStatus
from anneal.contracts.schemas.actions import CHANGED_BY_ACTIONS
from anneal.contracts.schemas.runs.comparison import ComparedRun, Reached, RunComparison
from anneal.contracts.schemas.runs.placement import Resources
from app.api.errors import invalid, not_found
from app.runs.reading.metrics.curves import read_curves
from app.runs.state import service
from app.tables.runs import Run

_MOST = 20
_FEWEST_POINTS = 4
_EXTRA = "extra_eval_datasets"
_COMPARED = ("backend", "dataset_id", "eval_dataset_id", "parent_run_id", "base_run_id")


async def compare_runs(session: AsyncSession, ids: Sequence[str]) -> RunComparison:
    """Compare runs by their configurations, resources and results; the session must be a snapshot."""
    run_ids = list(dict.fromkeys(ids))
    if not 2 <= len(run_ids) <= _MOST:
        message = f"name 2 to {_MOST} different runs, separated by commas"
        raise invalid([FieldError(field="ids", code="wrong_number", message=message)])
    runs_by_id = {run.id: run for run in (await session.scalars(select(Run).where(Run.id.in_(run_ids)))).all()}
    for id in run_ids:
        if id not in runs_by_id:
            raise not_found("run", id)
    runs = [runs_by_id[id] for id in run_ids]
    are_effective = all(run.effective_config for run in runs)
    fields = {
        run.id: _compared_fields(run, are_effective=are_effective)
        | {_EXTRA: await service.extra_eval_datasets(session, run)}
        for run in runs
    }
    differences, common = {}, {}
    for name in dict.fromkeys(name for of_run in fields.values() for name in of_run):
        values = {id: of_run.get(name) for id, of_run in fields.items()}
        first = values[run_ids[0]]
        if all(value == first and type(value) is type(first) for value in values.values()):
            common[name] = first
        else:
            differences[name] = values
    described = [await _compared_run(session, run) for run in runs]
    caution = _why_incomparable({TrainingMethod(run.method) for run in runs})
    return RunComparison(runs=described, caution=caution, differences=differences, common=common)


def _why_incomparable(methods: Set[TrainingMethod]) -> str | None:
    """Return why losses of runs of these methods cannot be compared; None if they can."""
    # All supervised methods have the same loss.
    kinds = {"supervised" if METHODS[method].is_supervised else method for method in methods}
    if len(kinds) < 2:
        return None
    named = sorted(methods)
    return (
        f"The losses of {', '.join(f'`{name}`' for name in named[:-1])} and `{named[-1]}` measure different things and "
        "cannot be compared, nor can rewards and losses: compare a run with others of its method."
    )


def _compared_fields(run: Run, *, are_effective: bool) -> dict[str, Any]:
    effective = run.effective_config or {}
    changed = effective.keys() if are_effective else CHANGED_BY_ACTIONS
    config = run.config | {name: effective[name] for name in changed if name in effective}
    fields = {f"config.{name}": value for name, value in config.items()}
    # A run of an earlier version has no value of fields that came later.
    resources = Resources.model_validate(run.resources).model_dump()
    fields |= {f"resources.{name}": value for name, value in resources.items()}
    return fields | {name: getattr(run, name) for name in _COMPARED}


async def _compared_run(session: AsyncSession, run: Run) -> ComparedRun:
    series = await read_curves(session, run.id, None, 0, None, _FEWEST_POINTS) if run.attempt else {}
    ended = run.started_at and run.finished_at
    return ComparedRun(
        run_id=run.id,
        name=run.name,
        experiment_id=run.experiment_id,
        method=TrainingMethod(run.method),
        status=TrainingStatus(run.status),
        current_step=run.current_step,
        total_steps=run.total_steps,
        best_loss=run.best_loss,
        seconds=(run.finished_at - run.started_at).total_seconds() if ended else None,  # type: ignore[operator]
        metrics={
            name: Reached(last_step=one.steps[-1], last=one.values[-1], min=one.min, max=one.max)
            for name, one in series.items()
            if one.steps
        },
    )
