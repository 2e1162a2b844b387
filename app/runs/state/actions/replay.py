"""Actions that an attempt must repeat after it resumes from a checkpoint; used by the worker, without HTTP."""

from typing import Any

from sqlalchemy import Select, func, select, text
from sqlalchemy.dialects.postgresql import aggregate_order_by

from app.tables.actions import RunAction


def done_after(run_id: str, step: int) -> Select[Any]:
    """Select one row: actions that took effect after a step > `step`, as an ordered JSON list.

    Items have id, action, parameters and step. An attempt that resumes from `step` repeats each of them after the same
    step. Actions that took effect earlier, or after `step` itself, are part of the checkpoint.
    """
    action = func.jsonb_build_object(
        "id", RunAction.id, "action", RunAction.action, "parameters", RunAction.parameters, "step", RunAction.step
    )
    actions = func.jsonb_agg(aggregate_order_by(action, RunAction.step, RunAction.id))
    return select(func.coalesce(actions, text("'[]'::jsonb"))).where(
        RunAction.run_id == run_id, RunAction.status == "done", RunAction.step > step
    )
