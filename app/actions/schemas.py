"""Actions on the wire."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, RootModel, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from app.runs.fields import Steps
from app.wire import Moment

MOST_CHARACTERS = 8_000
"""Of all prompts of an action together."""

Prompt = Annotated[str, StringConstraints(min_length=1, max_length=4_000)]


class _Action(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CheckpointAction(_Action):
    """Save a checkpoint now."""

    action: Literal["checkpoint"]
    pin: bool = Field(default=False, description="Pin it, so that it is kept however many newer ones there are.")


class EvaluateAction(_Action):
    """Evaluate now, on the run's evaluation data."""

    action: Literal["evaluate"]


class SampleAction(_Action):
    """Let the model write, as it is now."""

    action: Literal["sample"]
    prompts: list[Prompt] = Field(
        min_length=1,
        max_length=8,
        description=f"Each of at most 4,000 characters, together {MOST_CHARACTERS:,}. A run on chats sees each as a "
        "message of the user, any other as a text to go on with.",
    )
    max_new_tokens: int = Field(default=64, ge=1, le=512, description="Most tokens of each text.")
    temperature: float = Field(default=1.0, ge=0, le=10, description="0: always the likeliest token.")

    @model_validator(mode="after")
    def _fit(self) -> "SampleAction":
        if sum(len(prompt) for prompt in self.prompts) > MOST_CHARACTERS:
            raise ValueError(f"all prompts together may have {MOST_CHARACTERS:,} characters; send them in parts")
        return self


class SetLearningRateAction(_Action):
    """Go on with another learning rate."""

    action: Literal["set_learning_rate"]
    learning_rate: float = Field(
        gt=0, le=10, description="The new highest rate: the schedule's factor of each step stays, and is of this now."
    )


class ExtendAction(_Action):
    """Train longer than planned."""

    action: Literal["extend"]
    max_steps: Steps | None = Field(default=None, description="Optimizer steps in all.")
    epochs: float | None = Field(default=None, gt=0, le=10_000, description="Passes over the data in all.")

    @model_validator(mode="after")
    def _one(self) -> "ExtendAction":
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("say how long the run is to be in all: either `max_steps` or `epochs`")
        return self


AnyAction = CheckpointAction | EvaluateAction | SampleAction | SetLearningRateAction | ExtendAction


Name = Literal["checkpoint", "evaluate", "sample", "set_learning_rate", "extend"]


class ActionCreate(RootModel[Annotated[AnyAction, Field(discriminator="action")]]):
    """What is to be done between two steps of a run."""

    model_config = ConfigDict(json_schema_extra={"example": {"action": "checkpoint", "pin": True}})

    @model_validator(mode="before")
    @classmethod
    def _named(cls, asked: Any) -> Any:
        if isinstance(asked, Mapping) and asked.get("action") not in get_args(Name):
            names = ", ".join(f"`{name}`" for name in get_args(Name))
            raise PydanticCustomError("unknown_action", "must be one of {names}", {"names": names, "field": "action"})
        return asked


class ActionRead(BaseModel):
    """Something that was asked of a run, and what came of it."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "example": {
                "id": "act_01k3x9m6q2v8s4t0w7y5z1a3d0",
                "run_id": "run_01k3x9m6q2v8s4t0w7y5z1a3b6",
                "action": "set_learning_rate",
                "parameters": {"learning_rate": 0.0001},
                "status": "done",
                "step": 41,
                "attempt": 1,
                "result": {"before": 0.0002, "learning_rate": 0.0001},
                "message": None,
                "created_by": None,
                "created_at": "2026-01-02T03:04:05.678Z",
                "finished_at": "2026-01-02T03:04:05.912Z",
            }
        },
    )

    id: str
    run_id: str
    action: Name
    parameters: dict[str, Any]
    status: Literal["waiting", "done", "refused", "failed"] = Field(
        description="`refused`: it was not even tried, `failed`: it did not work; `message` says why."
    )
    step: int | None = Field(description="It took effect behind this step: the next one is the first that shows it.")
    attempt: int | None
    result: dict[str, Any] | None
    message: str | None
    created_by: str | None
    created_at: Moment
    finished_at: Moment | None
