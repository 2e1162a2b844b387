"""Experiments on the wire."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from app.runs.fields import TrainingStatus
from app.runs.schemas import Label, Moment


class ExperimentCreate(BaseModel):
    """A group to put runs into."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "name": "docstrings",
                "description": "Which rank is enough?",
                "tags": ["python", "llama"],
            }
        },
    )

    name: Label
    description: Annotated[str, StringConstraints(max_length=10_000)] = ""
    tags: Annotated[list[Label], Field(max_length=50)] = []


class ExperimentEdit(BaseModel):
    """What to change about an experiment; what is left out stays as it is."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"name": "docstrings, ranks", "tags": ["python"]}}
    )

    name: Label | None = None
    description: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    tags: Annotated[list[Label], Field(max_length=50)] | None = Field(default=None, description="All of them.")


class ExperimentSummary(BaseModel):
    """An experiment in a list."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "example": {
                "id": "exp_01k3x9m6q2v8s4t0w7y5z1a3b6",
                "name": "docstrings",
                "description": "Which rank is enough?",
                "tags": ["python", "llama"],
                "created_at": "2026-01-02T03:04:05.678Z",
                "created_by": "key_01k3x9m6q2v8s4t0w7y5z1a3b5",
            }
        },
    )

    id: str
    name: str
    description: str
    tags: list[str]
    created_at: Moment
    created_by: str | None


class BestRun(BaseModel):
    """The run with the lowest loss so far."""

    run_id: str
    name: str
    best_loss: float


class ExperimentView(ExperimentSummary):
    """An experiment with a look at its runs."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "exp_01k3x9m6q2v8s4t0w7y5z1a3b6",
                "name": "docstrings",
                "description": "Which rank is enough?",
                "tags": ["python", "llama"],
                "created_at": "2026-01-02T03:04:05.678Z",
                "created_by": "key_01k3x9m6q2v8s4t0w7y5z1a3b5",
                "runs": {
                    "pending": 1,
                    "initializing": 0,
                    "running": 1,
                    "checkpointing": 0,
                    "completed": 4,
                    "failed": 0,
                    "cancelled": 1,
                },
                "best_run": {"run_id": "run_01k3x9m6q2v8s4t0w7y5z1a3b7", "name": "rank 8", "best_loss": 1.93},
            }
        }
    )

    runs: dict[TrainingStatus, int]
    """How many of its runs have each status."""
    best_run: BestRun | None
