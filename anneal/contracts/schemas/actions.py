"""Wire models of actions."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator
from pydantic_core import PydanticCustomError

from anneal.contracts.field_types import Timestamp
from anneal.contracts.prompts import MOST_PROMPT_CHARACTERS, PromptText
from anneal.contracts.training_config.fields import Steps


class _Action(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CheckpointAction(_Action):
    """Save a checkpoint now."""

    action: Literal["checkpoint"]
    pin: bool = Field(default=False, description="Pin the checkpoint, so that retention never deletes it.")


class EvaluateAction(_Action):
    """Evaluate now, on the run's evaluation data."""

    action: Literal["evaluate"]


class SampleAction(_Action):
    """Generate text with the current model."""

    action: Literal["sample"]
    prompts: list[PromptText] = Field(
        min_length=1,
        max_length=8,
        description=f"Prompts of at most 4,000 characters each and {MOST_PROMPT_CHARACTERS:,} in total. In a run on "
        "chat data each prompt is a user message, otherwise a text to continue.",
    )
    max_new_tokens: int = Field(default=64, ge=1, le=512, description="Maximum number of tokens of each completion.")
    temperature: float = Field(default=1.0, ge=0, le=10, description="Sampling temperature; 0 selects greedy decoding.")

    @model_validator(mode="after")
    def _check_size(self) -> "SampleAction":
        if sum(len(prompt) for prompt in self.prompts) > MOST_PROMPT_CHARACTERS:
            raise ValueError(f"all prompts together exceed {MOST_PROMPT_CHARACTERS:,} characters; send several actions")
        return self


class SetLearningRateAction(_Action):
    """Change the learning rate."""

    action: Literal["set_learning_rate"]
    learning_rate: float = Field(
        gt=0, le=10, description="New peak learning rate; the schedule keeps its factor at each step."
    )


class ExtendAction(_Action):
    """Train longer than planned."""

    action: Literal["extend"]
    max_steps: Steps | None = Field(default=None, description="New total number of optimizer steps.")
    epochs: float | None = Field(default=None, gt=0, le=10_000, description="New total number of epochs.")

    @model_validator(mode="after")
    def _require_one_length(self) -> "ExtendAction":
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("set the new total length of the run: either `max_steps` or `epochs`")
        return self


AnyAction = CheckpointAction | EvaluateAction | SampleAction | SetLearningRateAction | ExtendAction


CHANGED_BY_ACTIONS = ("learning_rate", "max_steps", "epochs")
"""Fields of the configuration that actions change: their values in effect are in `effective_config`."""
Name = Literal["checkpoint", "evaluate", "sample", "set_learning_rate", "extend"]


class ActionCreate(RootModel[Annotated[AnyAction, Field(discriminator="action")]]):
    """Action to execute between two steps of a run."""

    model_config = ConfigDict(json_schema_extra={"example": {"action": "checkpoint", "pin": True}})

    @model_validator(mode="before")
    @classmethod
    def _check_name(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("action") not in get_args(Name):
            names = ", ".join(f"`{name}`" for name in get_args(Name))
            raise PydanticCustomError("unknown_action", "must be one of {names}", {"names": names, "field": "action"})
        return value


class ActionRead(BaseModel):
    """Action of a run and its result."""

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
        description="`refused`: not attempted; `failed`: attempted without success; `message` has the reason."
    )
    step: int | None = Field(description="Step after which it took effect; the next step is the first affected.")
    attempt: int | None
    result: dict[str, Any] | None
    message: str | None
    created_by: str | None
    created_at: Timestamp
    finished_at: Timestamp | None
