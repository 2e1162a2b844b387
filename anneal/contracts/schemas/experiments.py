"""Wire models of experiments."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from anneal.contracts.field_types import DeviceQuota, Timestamp
from anneal.contracts.methods import TrainingMethod
from anneal.contracts.run_status import TrainingStatus
from anneal.contracts.schemas.runs.common import Label
from anneal.contracts.schemas.short_repr import ShortRepr


class ExperimentCreate(BaseModel):
    """Request to create an experiment."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "name": "docstrings",
                "description": "Which rank is enough?",
                "tags": ["python", "llama"],
                "max_devices": 8,
            }
        },
    )

    name: Label
    description: Annotated[str, StringConstraints(max_length=10_000)] = ""
    tags: Annotated[list[Label], Field(max_length=50)] = []
    max_devices: DeviceQuota | None = Field(
        default=None,
        description="Devices that its runs may use at a time; null: any number. A run that would exceed the quota "
        "waits; with 0 none starts.",
    )


class ExperimentEdit(BaseModel):
    """Changes to an experiment; omitted fields stay unchanged."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"name": "docstrings, ranks", "tags": ["python"], "max_devices": 16}},
    )

    name: Label | None = None
    description: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    tags: Annotated[list[Label], Field(max_length=50)] | None = Field(
        default=None, description="Complete list of tags; replaces the existing ones."
    )
    max_devices: DeviceQuota | None = Field(
        default=None,
        description="Devices that its runs may use at a time; null removes the quota. Runs that use more already "
        "continue.",
    )


class ExperimentSummary(ShortRepr):
    """Experiment as shown in lists."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "example": {
                "id": "exp_01k3x9m6q2v8s4t0w7y5z1a3b6",
                "name": "docstrings",
                "description": "Which rank is enough?",
                "tags": ["python", "llama"],
                "max_devices": 8,
                "created_at": "2026-01-02T03:04:05.678Z",
                "created_by": "key_01k3x9m6q2v8s4t0w7y5z1a3b5",
            }
        },
    )

    id: str
    name: str
    description: str
    tags: list[str]
    max_devices: int | None = Field(description="Devices that its runs may use at a time; null: any number.")
    created_at: Timestamp
    created_by: str | None


class BestRun(BaseModel):
    """Best run of a method so far."""

    run_id: str
    name: str
    method: TrainingMethod
    metric: Literal["eval_loss", "eval_reward", "loss"] = Field(
        description="Metric by which it is the best: that of evaluations, or `loss` if no run of the method has any."
    )
    value: float


class ExperimentContents(BaseModel):
    """Everything that is deleted with an experiment."""

    runs: dict[TrainingStatus, int] = Field(description="Number of its runs in each status.")
    checkpoints: int = Field(default=0, description="Number of checkpoints of its runs.")
    models: int = Field(default=0, description="Number of fine-tuned models of its runs.")

    @property
    def is_empty(self) -> bool:
        """True if the experiment has no runs."""
        return not any(self.runs.values())

    def as_sentence(self) -> str:
        """Return the counts, such as `2 runs (1 completed, 1 failed), 3 checkpoints and 1 model`."""
        statuses = ", ".join(f"{count} {status}" for status, count in self.runs.items() if count)
        runs, checkpoints, models = (
            f"{count} {noun}" if count == 1 else f"{count} {noun}s"
            for count, noun in (
                (sum(self.runs.values()), "run"),
                (self.checkpoints, "checkpoint"),
                (self.models, "model"),
            )
        )
        return f"{runs} ({statuses}), {checkpoints} and {models}"


class ExperimentView(ExperimentSummary, ExperimentContents):
    """Experiment with a summary of its runs."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "exp_01k3x9m6q2v8s4t0w7y5z1a3b6",
                "name": "docstrings",
                "description": "Which rank is enough?",
                "tags": ["python", "llama"],
                "max_devices": 8,
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
                "checkpoints": 12,
                "models": 4,
                "best_runs": [
                    {
                        "run_id": "run_01k3x9m6q2v8s4t0w7y5z1a3b7",
                        "name": "rank 8",
                        "method": "qlora",
                        "metric": "eval_loss",
                        "value": 1.93,
                    }
                ],
            }
        }
    )

    best_runs: list[BestRun] = Field(
        description="Best run of each method, since results of different methods cannot be compared."
    )
