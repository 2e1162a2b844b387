"""Operations on the actions of a run."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts import plugins
from anneal.contracts.errors import FieldError
from anneal.contracts.methods import method_of
from anneal.contracts.run_status import TERMINAL
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.actions import (
    AnyAction,
    EvaluateAction,
    ExtendAction,
    SampleAction,
    SetLearningRateAction,
)
from anneal.contracts.training_config.raw_config import is_probe
from app.api.errors import ApiError, conflict, invalid
from app.api.idempotency import Idempotency, idempotency_key_reused
from app.api.pagination import Paging, fetch_page
from app.infra.ids import is_id, new_id
from app.runs.state.service import lock_run
from app.tables.actions import RunAction
from app.tables.runs import Run

MOST_WAITING = 20
"""Limit on waiting actions, because each lease renewal sends all of them to the worker."""


async def create_action(
    session: AsyncSession, run_id: str, request: AnyAction, created_by: str | None, idempotency: Idempotency | None
) -> RunAction:
    """Accept an action; a repeated idempotency key returns the same action.

    Raises 409 if the run has ended (`run_has_ended`), is stopping (`run_is_stopping`), or has too many waiting actions
    (`too_many_waiting`); 422 if the action is not possible for this run.
    """
    # Locked, so that a transaction that ends the run waits, and then finds and refuses the action.
    run = await lock_run(session, run_id)
    if earlier := await _find_replay(session, run, created_by, idempotency):
        return earlier
    if run.status in TERMINAL:
        way = " Resume the run to continue training." if run.task == RunTask.train else ""
        raise conflict("run_has_ended", f"Run {run_id} is {run.status} and accepts no more actions.{way}")
    if run.stop_requested_at is not None:
        raise conflict(
            "run_is_stopping", f"Run {run_id} is {run.status} and a stop was requested: it accepts no more actions."
        )
    waiting = [RunAction.run_id == run.id, RunAction.status == "waiting"]
    if (await session.scalar(select(func.count()).select_from(RunAction).where(*waiting)) or 0) >= MOST_WAITING:
        raise conflict(
            "too_many_waiting",
            f"Run {run_id} is {run.status} and has {MOST_WAITING} waiting actions; retry after it has executed some.",
        )
    problems = _action_problems(run, request)
    if problems:
        raise invalid(problems)
    action = RunAction(
        id=new_id("act"),
        run_id=run.id,
        action=request.action,
        parameters=request.model_dump(mode="json", exclude={"action"}, exclude_none=True),
        created_by=created_by,
        idempotency_key=idempotency.key if idempotency else None,
        request_digest=idempotency.digest if idempotency else None,
    )
    session.add(action)
    await session.flush()
    await session.refresh(action)
    return action


async def list_actions(session: AsyncSession, run_id: str, paging: Paging) -> tuple[list[RunAction], bool]:
    """Return a page of a run's actions, newest first."""
    return await fetch_page(session, select(RunAction).where(RunAction.run_id == run_id), RunAction.id, paging)


async def get_action(session: AsyncSession, run_id: str, action_id: str) -> RunAction:
    """Return an action of this run; raise 404 `action_not_found` otherwise."""
    action = await session.get(RunAction, action_id) if is_id(action_id, "act") else None
    if action is None or action.run_id != run_id:
        raise ApiError(
            404,
            "action_not_found",
            f"Run {run_id} has no action {action_id[:60]}; list its actions with GET /v1/runs/{run_id}/actions.",
        )
    return action


async def read_config_changes(session: AsyncSession, run_id: str) -> dict[str, Any]:
    """Return the configuration fields that actions changed while the run trained, with their current values."""
    query = select(RunAction.action, RunAction.parameters).where(
        RunAction.run_id == run_id, RunAction.status == "done", RunAction.action.in_(("set_learning_rate", "extend"))
    )
    changed: dict[str, Any] = {}
    for action, parameters in (await session.execute(query.order_by(RunAction.id))).tuples():
        if action == "extend" and "epochs" in parameters:
            changed |= {"max_steps": None}  # `max_steps` would take precedence over `epochs`
        changed |= parameters
    return changed


async def _find_replay(
    session: AsyncSession, run: Run, created_by: str | None, idempotency: Idempotency | None
) -> RunAction | None:
    """Return the action created by an earlier request with this key; raise 422 if that request was different."""
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
        raise idempotency_key_reused(action.id)
    return action


def _action_problems(run: Run, request: AnyAction) -> Sequence[FieldError]:
    if run.task != RunTask.train:
        message = (
            f"the task of the run is `{run.task}`, and actions take effect between steps of a training; stop it instead"
        )
        return [FieldError(field="action", code="not_for_this_task", message=message)]
    config = {**run.config, **(run.effective_config or {})}
    if is_probe(config):
        message = "the run is a probe, which takes two steps and saves nothing; use the action on the run it measures"
        return [FieldError(field="action", code="not_for_a_probe", message=message)]
    if isinstance(request, EvaluateAction) and run.eval_dataset_id is None and not config.get("eval_split"):
        message = "the run has no evaluation data; create it with `eval_dataset_id` or `eval_split`, and `eval_steps`"
        return [FieldError(field="action", code="no_evaluation_data", message=message)]
    if isinstance(request, SampleAction) and method_of(config).has_reward_head:
        message = "a reward model scores texts and cannot generate any; sample a run of another method"
        return [FieldError(field="action", code="not_for_this_method", message=message)]
    if isinstance(request, SetLearningRateAction | ExtendAction) and plugins.controls_learning_rate(config):
        message = (
            "the run's optimizer or scheduler is a plugin, for which the effect of another learning rate or of more "
            "steps during training is unknown; stop the run, and resume it with the changes"
        )
        return [FieldError(field="action", code="not_with_a_plugin", message=message)]
    if isinstance(request, ExtendAction):
        return _not_longer(run, config, request)
    return []


def _not_longer(run: Run, config: dict[str, Any], request: ExtendAction) -> Sequence[FieldError]:
    """Return an error if the run would not train longer, as far as known here; the trainer checks again."""
    total = run.total_steps or config.get("max_steps")
    if request.max_steps is not None and total is not None and request.max_steps <= total:
        message = f"the run already has {total} planned steps and is at step {run.current_step}; set a larger value"
        return [FieldError(field="max_steps", code="not_longer", message=message)]
    if request.epochs is not None and config.get("max_steps") is None and request.epochs <= config["epochs"]:
        message = f"the run already has {config['epochs']:g} planned epochs; set a larger value"
        return [FieldError(field="epochs", code="not_longer", message=message)]
    stop = config.get("stop_at_step")
    end = request.max_steps if request.max_steps is not None else (total or 0) + 1
    if stop is not None and run.current_step < stop < end:
        field = "epochs" if request.max_steps is None else "max_steps"
        message = (
            f"the run ends at step {stop}, its `stop_at_step`; after it has ended, resume it with another "
            "`stop_at_step` and more steps"
        )
        return [FieldError(field=field, code="stops_before", message=message)]
    return []
