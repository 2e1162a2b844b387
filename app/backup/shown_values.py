"""Values of archived rows that the API reads: one that no version writes would fail every request that reads it."""

import sys
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from anneal.contracts.attempt.failure_report import FailureReport
from anneal.contracts.events import EVENT_TYPES
from anneal.contracts.methods import TrainingMethod
from anneal.contracts.schemas.actions import ActionRead
from anneal.contracts.schemas.checkpoints import CheckpointRead
from anneal.contracts.schemas.datasets import DatasetView
from anneal.contracts.schemas.experiments import ExperimentSummary
from anneal.contracts.schemas.runs.reads import RunRead
from app.runs.queue.durations import Timings
from app.runs.reading.metrics.rollups import MOST_STEP, VALUES, step_of

_SHOWN_AS: Mapping[str, type[BaseModel]] = {
    "experiments": ExperimentSummary,
    "datasets": DatasetView,
    "runs": RunRead,
    "checkpoints": CheckpointRead,
    "run_actions": ActionRead,
}
_LARGEST = sys.float_info.max
_Extent = Annotated[list[Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)] | None], Field(min_length=VALUES)]
_PARTS: Mapping[str, Mapping[str, Any]] = {
    "run_attempts": {"report": FailureReport | None},
    "run_timings": {"timings": Timings},
    "metric_rollups": {"series": dict[str, _Extent]},
}
"""Types of JSON columns that the API reads without showing them."""


@cache
def _type_adapters(table: str) -> Mapping[str, TypeAdapter[Any]]:
    fields = _SHOWN_AS[table].model_fields if table in _SHOWN_AS else {}
    types: dict[str, Any] = {name: Annotated[field.annotation, field] for name, field in fields.items()}
    return {name: TypeAdapter(type) for name, type in {**types, **_PARTS.get(table, {})}.items()}


def invalid_column(table: str, row: Mapping[str, Any]) -> str | None:
    """Return the first column whose value the API cannot read; None if it can read the row."""
    for name, adapter in _type_adapters(table).items():
        if name in row:
            try:
                adapter.validate_python(row[name])
            except ValidationError:
                return name
    if table == "run_events":
        if row.get("type") not in EVENT_TYPES:
            return "type"
        return None if _is_readable(row["type"], row.get("data")) else "data"
    if table == "metric_rollups":
        return None if _is_counted(row) else "points"
    if table == "runs" and (row.get("config") or {}).get("method") not in set(TrainingMethod):
        return "config"
    return None


def _is_readable(type: str, data: Any) -> bool:
    """Return True if lists and curves of runs can be made of an event."""
    if not isinstance(data, dict):
        return False
    if type == "log":
        return isinstance(data.get("line"), str) and isinstance(data.get("left_out", 0), int)
    if type != "metric":
        return True
    extra = data.get("extra")
    numbers = [data.get("loss"), extra.get("reward") if isinstance(extra, dict) else None]
    # Integers of JSON may be larger than any float.
    is_finite = all(-_LARGEST <= number <= _LARGEST for number in numbers if isinstance(number, int | float))
    return step_of(data) is not None and is_finite


def _is_counted(row: Mapping[str, Any]) -> bool:
    """Return True if the steps and points of a roll-up are those of a part of a curve."""
    numbers: list[Any] = [row.get(name) for name in ("first_step", "last_step", "points")]
    if not all(isinstance(number, int) for number in numbers):
        return False
    first, last, points = numbers
    return bool(0 <= first <= last <= MOST_STEP and 1 <= points <= MOST_STEP)
