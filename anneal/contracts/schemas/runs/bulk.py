"""Wire models of requests that change several runs, and of what became of each."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from anneal.contracts.schemas.runs.common import OTHER_RUN_ID, RUN_ID, Body, Label
from anneal.contracts.schemas.runs.requests import MOST_TAGS, RunStop

MOST_RUNS = 100


class RunsChange(Body):
    """Request to change several runs."""

    ids: list[Annotated[str, StringConstraints(max_length=100)]] = Field(
        min_length=1, max_length=MOST_RUNS, description="IDs of the runs; a repeated one counts once."
    )


class RunsStop(RunsChange, RunStop):
    """Request to stop several runs."""

    model_config = ConfigDict(json_schema_extra={"example": {"ids": [RUN_ID, OTHER_RUN_ID], "mode": "checkpoint"}})


class RunsDelete(RunsChange):
    """Request to delete several runs that have ended."""

    model_config = ConfigDict(json_schema_extra={"example": {"ids": [RUN_ID, OTHER_RUN_ID]}})


class RunsTag(RunsChange):
    """Request to add tags to several runs, or to remove some."""

    model_config = ConfigDict(json_schema_extra={"example": {"ids": [RUN_ID, OTHER_RUN_ID], "add": ["keep"]}})

    add: list[Label] = Field(default=[], max_length=MOST_TAGS, description="Tags that each of the runs shall have.")
    remove: list[Label] = Field(default=[], max_length=MOST_TAGS, description="Tags that none of them shall have.")

    @model_validator(mode="after")
    def _change_something(self) -> "RunsTag":
        if not self.add and not self.remove:
            raise PydanticCustomError("no_tags", "names no tag: set `add`, `remove` or both")
        if both := sorted(set(self.add) & set(self.remove)):
            raise PydanticCustomError("contradiction", "adds and removes the tag {tag}", {"tag": repr(both[0])})
        return self


class RunChange(BaseModel):
    """Outcome for one run."""

    id: str
    outcome: Literal["changed", "unchanged", "refused"] = Field(
        description="`unchanged`: it is already as requested, such as a run that ended before the stop; no failure. "
        "`refused`: `code` and `detail` say why."
    )
    code: str | None = Field(default=None, description="Error code that a request for this run alone would have.")
    detail: str | None = None


class RunChanges(BaseModel):
    """Outcome for each run."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "runs": [
                    {"id": RUN_ID, "outcome": "changed", "code": None, "detail": None},
                    {
                        "id": OTHER_RUN_ID, "outcome": "unchanged", "code": "run_has_ended",
                        "detail": f"Run {OTHER_RUN_ID} is completed: it has ended by itself and can no longer be "
                        "stopped.",
                    },
                ]
            }
        }
    )  # fmt: skip

    runs: list[RunChange] = Field(description="In the order of the request.")
