"""Wire models of fine-tuning jobs in the OpenAI-compatible API."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.config import JsonDict

from anneal.contracts.rewards import ServiceUrl
from anneal.contracts.schemas.openai.files import FILE_ID
from anneal.contracts.schemas.openai.graders import JUDGE_URL, Grader
from anneal.contracts.schemas.openai.lists import Listed
from anneal.contracts.schemas.runs.common import CHECKPOINT_ID, Body, Config
from anneal.contracts.schemas.runs.placement import in_words
from anneal.contracts.schemas.runs.requests import RunOptions, limit_size
from anneal.contracts.training_config.fields import TrackerName

JOB_ID = "ftjob-01k3x9m6q2v8s4t0w7y5z1a3b6"

_Epochs = Annotated[int, Field(ge=1, le=10_000)]
Epochs = Annotated[_Epochs | Literal["auto"], in_words("must be `auto` or an integer from 1 to 10,000")]
_RowsPerStep = Annotated[int, Field(ge=1, le=65_536)]
RowsPerStep = Annotated[_RowsPerStep | Literal["auto"], in_words("must be `auto` or an integer from 1 to 65,536")]
_Multiplier = Annotated[float, Field(gt=0, le=1000)]
Multiplier = Annotated[_Multiplier | Literal["auto"], in_words("must be `auto` or a number above 0, up to 1,000")]
_Beta = Annotated[float, Field(gt=0, le=100)]
Beta = Annotated[_Beta | Literal["auto"], in_words("must be `auto` or a number above 0, up to 100")]
_Steps = Annotated[int, Field(ge=1, le=1_000_000)]
Steps = Annotated[_Steps | Literal["auto"], in_words("must be `auto` or an integer from 1 to 1,000,000")]
_EvalSamples = Annotated[
    Literal["auto"],
    in_words("must be `auto`: an evaluation generates as many completions of a prompt as training; leave it out"),
]
_ReasoningEffort = Annotated[
    Literal["default"],
    in_words(
        "must be `default`: the models have no levels of effort; limit completions with `rlhf.max_completion_length` "
        "in `anneal.config`"
    ),
]


class Hyperparameters(Body):
    """Hyperparameters of a job; `auto` is the default of the service."""

    batch_size: RowsPerStep | None = Field(default=None, description="Rows of one optimizer step on all devices.")
    learning_rate_multiplier: Multiplier | None = Field(
        default=None, description="Factor of the default learning rate of the method."
    )
    n_epochs: Epochs | None = Field(default=None, description="Number of passes over the data.")


class DpoHyperparameters(Hyperparameters):
    """Hyperparameters of a job of type `dpo`."""

    beta: Beta | None = Field(default=None, description="Strength of the tie to the reference model.")


class ReinforcementHyperparameters(Hyperparameters):
    """Hyperparameters of a job of type `reinforcement`, whose rows are prompts."""

    compute_multiplier: Multiplier | None = Field(
        default=None, description="Factor of the default number of completions for each prompt."
    )
    eval_interval: Steps | None = Field(default=None, description="Steps between evaluations.")
    eval_samples: _EvalSamples | None = Field(default=None, description="Only `auto`.")
    reasoning_effort: _ReasoningEffort | None = Field(default=None, description="Only `default`.")


class SupervisedOptions(Body):
    """Options of the type `supervised`."""

    hyperparameters: Hyperparameters | None = None


class DpoJobOptions(Body):
    """Options of the type `dpo`."""

    hyperparameters: DpoHyperparameters | None = None


class ReinforcementOptions(Body):
    """Options of the type `reinforcement`."""

    grader: Grader = Field(
        description="Grader of completions: `string_check`, `text_similarity`, `score_model`, `label_model`, or "
        "`multi` with a weighted sum of them. `python` is refused."
    )
    hyperparameters: ReinforcementHyperparameters | None = None


class JobMethod(Body):
    """Method of a job: a type, and its options in the field of the same name."""

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: SupervisedOptions | None = None
    dpo: DpoJobOptions | None = None
    reinforcement: ReinforcementOptions | None = None


class WandbIntegration(Body):
    """Project of Weights & Biases that receives the metrics."""

    project: TrackerName
    name: TrackerName | None = None
    entity: TrackerName | None = None


class Integration(Body):
    """Tracker that also receives the metrics."""

    type: Literal["wandb"]
    wandb: WandbIntegration


class NativeOptions(RunOptions):
    """Fields of `POST /v1/runs` that OpenAI's API has no counterpart of."""

    config: Annotated[Config, AfterValidator(limit_size)] = Field(
        default_factory=dict, description="Further fields of the training configuration."
    )
    grader_url: ServiceUrl = Field(
        default=JUDGE_URL, description="Base URL of the OpenAI-compatible API whose models grade, on an allowed host."
    )


MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
MOST_METADATA = 16


class JobCreate(Body):
    """Request to create a fine-tuning job."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": "my-model",
                "training_file": FILE_ID,
                "suffix": "docstrings",
                "seed": 7,
                "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 8}}},
                "metadata": {"team": "docs"},
                "anneal": {"config": {"lora_r": 8}},
            }
        }
    )

    model: str = Field(
        min_length=1, max_length=300, description="Base model, as `config.base_model` of a run: a name or `run_…`."
    )
    training_file: str = Field(max_length=100, description="ID of the file to train on.")
    validation_file: str | None = Field(
        default=None, max_length=100, description="ID of the file to evaluate on, after each epoch by default."
    )
    suffix: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        default=None, description="Name of the run."
    )
    seed: int | None = Field(default=None, ge=0, le=2**32 - 1, description="Random seed; null: 42.")
    metadata: dict[MetadataKey, MetadataValue] | None = Field(
        default=None, max_length=MOST_METADATA, description="Texts by name, by which jobs are listed."
    )
    integrations: Annotated[list[Integration], Field(max_length=1)] | None = None
    method: JobMethod | None = Field(default=None, description="Null: `supervised`, or `config.method` of `anneal`.")
    hyperparameters: Hyperparameters | None = Field(
        default=None, description="Deprecated: those of `method.supervised`."
    )
    anneal: NativeOptions = Field(default_factory=NativeOptions, description="Fields of `POST /v1/runs`.")


_HYPERPARAMETERS: JsonDict = {"batch_size": 8, "learning_rate_multiplier": 1.0, "n_epochs": 2}
_JOB: JsonDict = {
    "id": JOB_ID, "object": "fine_tuning.job", "created_at": 1767323045, "finished_at": None,
    "estimated_finish": 1767323940, "model": "my-model", "fine_tuned_model": None, "organization_id": "anneal",
    "status": "running", "hyperparameters": _HYPERPARAMETERS,
    "method": {"type": "supervised", "supervised": {"hyperparameters": _HYPERPARAMETERS}},
    "training_file": FILE_ID, "validation_file": None, "result_files": [], "trained_tokens": None, "seed": 7,
    "integrations": [], "metadata": {"team": "docs"}, "error": None,
}  # fmt: skip

JobStatus = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]


class UsedHyperparameters(BaseModel):
    """Hyperparameters in use; `auto` where they are not numbers of OpenAI's kinds, such as a limit of steps."""

    batch_size: int
    learning_rate_multiplier: float
    n_epochs: float | int | Literal["auto"]
    beta: float | None = Field(default=None, exclude_if=lambda beta: beta is None)


class JobError(BaseModel):
    """Reason why a job has failed."""

    code: str
    message: str
    param: str | None = None


class JobObject(Listed):
    """Fine-tuning job: a run that trains, and the runs that have resumed it."""

    model_config = ConfigDict(json_schema_extra={"example": _JOB})

    id: str = Field(description="`ftjob-` with the characters that follow `run_` in the id of its first run.")
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int = Field(description="Unix time in seconds.")
    finished_at: int | None = Field(description="Unix time in seconds; null before it has ended, also while paused.")
    estimated_finish: int | None = Field(description="Predicted Unix time of its end in seconds; null: unknown.")
    model: str = Field(description="Base model.")
    fine_tuned_model: str | None = Field(description="`run_…`, the output; null before it has succeeded.")
    organization_id: Literal["anneal"] = "anneal"
    status: JobStatus
    hyperparameters: UsedHyperparameters
    method: dict[str, Any] | None = Field(description="Type and its hyperparameters; null for a method of no type.")
    training_file: str
    validation_file: str | None
    result_files: list[str] = Field(
        description="ID of the file with the metrics of its steps (CSV); empty before it has succeeded."
    )
    trained_tokens: int | None = Field(description="Tokens that were trained on; null before it has succeeded.")
    seed: int
    integrations: list[dict[str, Any]]
    metadata: dict[str, str] | None
    error: JobError | None


class JobEvent(Listed):
    """Event of a job."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "ftevent-01k3x9m6q2v8s4t0w7y5z1a3b6-41", "object": "fine_tuning.job.event",
                "created_at": 1767323045, "level": "info", "message": "Step 10 of 200: training loss 2.31",
                "type": "metrics", "data": {"step": 10, "total_steps": 200, "train_loss": 2.31},
            }
        }
    )  # fmt: skip

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int = Field(description="Unix time in seconds.")
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class CheckpointMetrics(BaseModel):
    """Metrics of a checkpoint; null where nothing was measured."""

    step: int
    train_loss: float | None
    valid_loss: float | None = Field(description="Mean loss of an evaluation of exactly these weights.")
    full_valid_loss: float | None = Field(description="The same: evaluations use all rows.")


class JobCheckpoint(Listed):
    """Checkpoint of a job."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": "ftckpt-01k3x9m6q2v8s4t0w7y5z1a3b8", "object": "fine_tuning.job.checkpoint",
                "created_at": 1767323045, "fine_tuned_model_checkpoint": CHECKPOINT_ID,
                "fine_tuning_job_id": JOB_ID, "step_number": 40,
                "metrics": {"step": 40, "train_loss": 1.9, "valid_loss": 2.1, "full_valid_loss": 2.1},
            }
        }
    )  # fmt: skip

    id: str = Field(description="`ftckpt-` with the characters that follow `ckpt_` in the id of the checkpoint.")
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int = Field(description="Unix time in seconds.")
    fine_tuned_model_checkpoint: str = Field(description="Its name as a model: `ckpt_…`.")
    fine_tuning_job_id: str
    step_number: int
    metrics: CheckpointMetrics
