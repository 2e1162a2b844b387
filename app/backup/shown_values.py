"""Values of archived rows that the API shows: one that no version writes would fail every request that shows it."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from app.contracts.methods import TrainingMethod
from app.contracts.schemas.actions import ActionRead
from app.contracts.schemas.checkpoints import CheckpointRead
from app.contracts.schemas.datasets import DatasetView
from app.contracts.schemas.experiments import ExperimentSummary
from app.contracts.schemas.runs.reads import RunRead

_SHOWN_AS: Mapping[str, type[BaseModel]] = {
    "experiments": ExperimentSummary,
    "datasets": DatasetView,
    "runs": RunRead,
    "checkpoints": CheckpointRead,
    "run_actions": ActionRead,
}


@cache
def _adapters(table: str) -> Mapping[str, TypeAdapter[Any]]:
    fields = _SHOWN_AS[table].model_fields if table in _SHOWN_AS else {}
    types: dict[str, Any] = {name: Annotated[field.annotation, field] for name, field in fields.items()}
    return {name: TypeAdapter(type) for name, type in types.items()}


def invalid_column(table: str, row: Mapping[str, Any]) -> str | None:
    """Return the first column whose value the API cannot show; None if it can show the row."""
    for name, adapter in _adapters(table).items():
        if name in row:
            try:
                adapter.validate_python(row[name])
            except ValidationError:
                return name
    if table == "run_events":
        data = row.get("data")
        is_shown = isinstance(data, dict) and (row.get("type") != "log" or isinstance(data.get("line"), str))
        return None if is_shown else "data"
    if table == "runs" and (row.get("config") or {}).get("method") not in set(TrainingMethod):
        return "config"
    return None
