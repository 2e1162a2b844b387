"""Wire models of a comparison of runs."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from anneal.contracts.methods import TrainingMethod
from anneal.contracts.run_status import TrainingStatus
from anneal.contracts.schemas.runs.common import EXPERIMENT_ID, OTHER_RUN_ID, RUN_ID
from anneal.contracts.schemas.short_repr import ShortRepr

_COMPARED: JsonDict = {
    "run_id": RUN_ID, "name": "rank 8", "experiment_id": EXPERIMENT_ID, "method": "qlora", "status": "completed",
    "current_step": 200, "total_steps": 200, "best_loss": 1.93, "seconds": 81.5,
    "metrics": {"loss": {"last_step": 200, "last": 1.95, "min": 1.93, "max": 4.1}},
}  # fmt: skip


class Reached(BaseModel):
    """Last value and extremes of a series of metrics."""

    last_step: int | None
    last: float | None = Field(description="Null if it was not finite.")
    min: float | None
    max: float | None


class ComparedRun(BaseModel):
    """Results of one run."""

    run_id: str
    name: str
    experiment_id: str
    method: TrainingMethod
    status: TrainingStatus
    current_step: int
    total_steps: int | None
    best_loss: float | None
    seconds: float | None = Field(description="Seconds from its first start to its end; null while it has not ended.")
    metrics: dict[str, Reached]


class RunComparison(ShortRepr):
    """Comparison of runs."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "runs": [_COMPARED, {**_COMPARED, "run_id": OTHER_RUN_ID, "name": "rank 16", "best_loss": 1.9}],
                "caution": None,
                "differences": {"config.lora_r": {RUN_ID: 8, OTHER_RUN_ID: 16}},
                "common": {"config.method": "qlora", "backend": "celery"},
            }
        }
    )

    runs: list[ComparedRun] = Field(description="In the requested order.")
    caution: str | None = Field(
        description="Sentence that says why losses of these runs cannot be compared; null if they can."
    )
    differences: dict[str, dict[str, Any]] = Field(
        description="Fields whose values differ, by run. Of the configuration, the values in effect if every run has "
        "reported them; otherwise those requested, with the changes by live actions."
    )
    common: dict[str, Any] = Field(description="Fields whose values are the same in all runs.")
