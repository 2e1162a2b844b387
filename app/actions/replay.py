"""What an attempt that goes back to a checkpoint has to do again. Without HTTP, for the worker."""

from typing import Any

from sqlalchemy import Select, func, select, text
from sqlalchemy.dialects.postgresql import aggregate_order_by

from app.actions.models import RunAction


def done_behind(run_id: str, step: int) -> Select[Any]:
    """One row: what took effect behind steps after `step`, as a JSON list of id, action, parameters, step in its order.

    An attempt that goes on from `step` does each once more, behind the same step. What took effect earlier, or behind
    `step` itself, is part of the checkpoint.
    """
    asked = func.jsonb_build_object(
        "id", RunAction.id, "action", RunAction.action, "parameters", RunAction.parameters, "step", RunAction.step
    )
    found = func.jsonb_agg(aggregate_order_by(asked, RunAction.step, RunAction.id))
    return select(func.coalesce(found, text("'[]'::jsonb"))).where(
        RunAction.run_id == run_id, RunAction.status == "done", RunAction.step > step
    )
