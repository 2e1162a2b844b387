"""Wire models of the curves of runs."""

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from anneal.contracts.schemas.runs.common import RUN_ID
from anneal.contracts.schemas.short_repr import ShortRepr


class Series(BaseModel):
    """One curve, thinned to the requested number of points; `min` and `max` are those of all its points."""

    steps: list[int]
    values: list[float | None] = Field(description="Null for a value that was not finite.")
    min: float | None
    max: float | None


class Clock(BaseModel):
    """Times of some steps, to draw curves along time; those of steps between them follow by interpolation."""

    steps: list[int]
    seconds: list[float] = Field(description="Seconds since the run first started, at these steps.")


_SERIES: JsonDict = {"steps": [10, 20], "values": [3.1, 2.31], "min": 2.31, "max": 3.1}


_CLOCK: JsonDict = {"steps": [1, 20], "seconds": [4.2, 61.5]}


class RunMetrics(ShortRepr):
    """Curves of a run."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"run_id": RUN_ID, "last_seq": 57, "series": {"loss": _SERIES}, "clock": _CLOCK}}
    )

    run_id: str
    last_seq: int = Field(
        description="`seq` of the newest event that the curves include: a stream after it continues them."
    )
    series: dict[str, Series]
    clock: Clock | None = Field(default=None, description="With `clock`: the times of some steps.")


class RunCurve(BaseModel):
    """A curve of one of several runs."""

    run_id: str
    series: Series = Field(description="Empty for a run without it.")
    epoch: Series = Field(description="Passes over the data, by step.")
    clock: Clock


class RunCurves(BaseModel):
    """One curve of several runs."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "name": "loss",
                "data": [
                    {
                        "run_id": RUN_ID, "series": _SERIES, "clock": _CLOCK,
                        "epoch": {"steps": [10, 20], "values": [0.5, 1.0], "min": 0.5, "max": 1.0},
                    }
                ],
            }
        }
    )  # fmt: skip

    name: str
    data: list[RunCurve] = Field(description="In the requested order.")
