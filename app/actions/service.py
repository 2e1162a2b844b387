"""What can be asked of a run while it trains."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.actions.models import RunAction
from app.actions.schemas import AnyAction, EvaluateAction, ExtendAction, SampleAction, SetLearningRateAction
from app.errors import ApiError, FieldError, conflict, invalid
from app.ids import is_id, new_id
from app.pagination import Paging, fetch
from app.runs import plugins
from app.runs.config import TrainingMethod
from app.runs.models import TERMINAL, Run
from app.runs.prediction import is_probe
from app.runs.service import Idempotency, key_reused, locked

MOST_WAITING = 20
"""Each renewal of a lease brings all of them to the worker."""


async def create(
    session: AsyncSession, run_id: str, wanted: AnyAction, created_by: str | None, idempotency: Idempotency | None
) -> RunAction:
    """Accept an action; the same idempotency key answers the same one.

    Raises 409 when the run has ended (`run_has_ended`), is about to (`run_is_stopping`), or has too many actions
    waiting (`too_many_waiting`); 422 for what cannot be done with this run.
    """
    # Locked: whoever ends the run waits, and then finds the action and refuses it.
    run = await locked(session, run_id)
    if earlier := await _replayed(session, run, created_by, idempotency):
        return earlier
    if run.status in TERMINAL:
        raise conflict(
            "run_has_ended",
            f"Run {run_id} is {run.status}: nothing can be done with it while it trains any more. Resume it to go on.",
        )
    if run.stop_requested_at is not None:
        raise conflict(
            "run_is_stopping", f"Run {run_id} is {run.status} and was asked to stop: it does nothing else any more."
        )
    waiting = [RunAction.run_id == run.id, RunAction.status == "waiting"]
    if (await session.scalar(select(func.count()).select_from(RunAction).where(*waiting)) or 0) >= MOST_WAITING:
        raise conflict(
            "too_many_waiting",
            f"Run {run_id} is {run.status} and has {MOST_WAITING} actions waiting; send more once it has done some.",
        )
    problems = _problems(run, wanted)
    if problems:
        raise invalid(problems)
    action = RunAction(
        id=new_id("act"),
        run_id=run.id,
        action=wanted.action,
        parameters=wanted.model_dump(mode="json", exclude={"action"}, exclude_none=True),
        created_by=created_by,
        idempotency_key=idempotency.key if idempotency else None,
        request_digest=idempotency.digest if idempotency else None,
    )
    session.add(action)
    await session.flush()
    await session.refresh(action)
    return action


async def page(session: AsyncSession, run_id: str, paging: Paging) -> tuple[list[RunAction], bool]:
    """Actions of a run, newest first."""
    return await fetch(session, select(RunAction).where(RunAction.run_id == run_id), RunAction.id, paging)


async def get(session: AsyncSession, run_id: str, action_id: str) -> RunAction:
    """An action of this run; `action_not_found` otherwise."""
    found = await session.get(RunAction, action_id) if is_id(action_id, "act") else None
    if found is None or found.run_id != run_id:
        raise ApiError(
            404,
            "action_not_found",
            f"Run {run_id} has no action {action_id[:60]}; GET /v1/runs/{run_id}/actions lists those it has.",
        )
    return found


async def changes(session: AsyncSession, run_id: str) -> dict[str, Any]:
    """The fields of its configuration that actions have changed while the run trained, and what they are now."""
    query = select(RunAction.action, RunAction.parameters).where(
        RunAction.run_id == run_id, RunAction.status == "done", RunAction.action.in_(("set_learning_rate", "extend"))
    )
    changed: dict[str, Any] = {}
    for action, parameters in (await session.execute(query.order_by(RunAction.id))).tuples():
        if action == "extend" and "epochs" in parameters:
            changed |= {"max_steps": None}  # which would win over the epochs
        changed |= parameters
    return changed


async def _replayed(
    session: AsyncSession, run: Run, created_by: str | None, idempotency: Idempotency | None
) -> RunAction | None:
    """The action that an earlier request with this key made; 422 when that request was another one."""
    if idempotency is None:
        return None
    action = await session.scalar(
        select(RunAction).where(
            RunAction.run_id == run.id,
            RunAction.created_by == created_by,
            RunAction.idempotency_key == idempotency.key,
        )
    )
    if action is not None and action.request_digest != idempotency.digest:
        raise key_reused(action.id)
    return action


def _problems(run: Run, wanted: AnyAction) -> Sequence[FieldError]:
    config = {**run.config, **(run.effective_config or {})}
    if is_probe(config):
        message = "the run is a probe: it takes two steps, saves nothing and ends; ask this of the run that it measures"
        return [FieldError(field="action", code="not_for_a_probe", message=message)]
    if isinstance(wanted, EvaluateAction) and run.eval_dataset_id is None and not config.get("eval_split"):
        message = "the run has no evaluation data: create runs with `eval_dataset_id` or `eval_split`, and `eval_steps`"
        return [FieldError(field="action", code="no_evaluation_data", message=message)]
    if isinstance(wanted, SampleAction) and config.get("method") == TrainingMethod.reward:
        message = "a reward model scores texts and writes none; sample a run of another method"
        return [FieldError(field="action", code="not_for_this_method", message=message)]
    if isinstance(wanted, SetLearningRateAction | ExtendAction) and plugins.makes_rates(config):
        message = (
            "the run's optimizer or scheduler is a plugin, and nobody knows what it would make of another learning "
            "rate or of more steps while it trains; stop the run, and resume it with what is to change"
        )
        return [FieldError(field="action", code="not_with_a_plugin", message=message)]
    if isinstance(wanted, ExtendAction):
        return _not_longer(run, config, wanted)
    return []


def _not_longer(run: Run, config: dict[str, Any], wanted: ExtendAction) -> Sequence[FieldError]:
    """Why it would train no longer. As far as it is known here; the trainer, which counts the steps, looks again."""
    total = run.total_steps or config.get("max_steps")
    if wanted.max_steps is not None and total is not None and wanted.max_steps <= total:
        message = f"the run is to have {total} steps already, and is at step {run.current_step}; name more"
        return [FieldError(field="max_steps", code="not_longer", message=message)]
    if wanted.epochs is not None and config.get("max_steps") is None and wanted.epochs <= config["epochs"]:
        message = f"the run is to have {config['epochs']:g} epochs already; name more"
        return [FieldError(field="epochs", code="not_longer", message=message)]
    stop = config.get("stop_at_step")
    end = wanted.max_steps if wanted.max_steps is not None else (total or 0) + 1
    if stop is not None and run.current_step < stop < end:
        field = "epochs" if wanted.max_steps is None else "max_steps"
        message = (
            f"the run ends at step {stop} in any case, which is its `stop_at_step`; once it has, resume it with "
            "another one, and with more steps"
        )
        return [FieldError(field=field, code="stops_before", message=message)]
    return []
