"""What goes over the wire about runs."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from app.estimates.schemas import EXAMPLE, Measured, ProbeResult, RunEstimate
from app.runs.config import TrainingConfig, TrainingStatus
from app.runs.prediction import Prediction
from app.wire import FieldError
from app.wire import Moment as Moment

RUN_ID = "run_01k3x9m6q2v8s4t0w7y5z1a3b6"
OTHER_RUN_ID = "run_01k3x9m6q2v8s4t0w7y5z1a3c7"
_DATASET_ID = "ds_01k3x9m6q2v8s4t0w7y5z1a3b7"
_CHECKPOINT_ID = "ckpt_01k3x9m6q2v8s4t0w7y5z1a3b8"
_EXPERIMENT_ID = "exp_01k3x9m6q2v8s4t0w7y5z1a3b9"
_CONFIG: JsonDict = {"base_model": "my-model", "method": "qlora", "lora_r": 16, "epochs": 1}

StopMode = Literal["checkpoint", "epoch_end", "best", "discard"]
MOST_TAGS = 50
Label = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""A name or tag."""


class _DocumentedAs:
    """Shows the schema of `model` for a value that the service checks itself, to tell all its problems at once."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(self._model.__pydantic_core_schema__)


Config = Annotated[dict[str, Any], _DocumentedAs(TrainingConfig)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class RunCreate(_Body):
    """A run to be made."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "name": "docstrings", "dataset_id": _DATASET_ID, "backend": "celery", "config": _CONFIG,
                "tags": ["demo"],
            }
        }
    )  # fmt: skip

    experiment_id: str | None = Field(default=None, max_length=100, description="None: the experiment `default`.")
    name: Label | None = Field(default=None, description="None: method and base model.")
    backend: str = Field(default="celery", max_length=100, description="GET /v1/backends lists them.")
    dataset_id: str = Field(max_length=100, description="What to train on.")
    eval_dataset_id: str | None = Field(
        default=None, max_length=100, description="What to evaluate on, every `eval_steps`."
    )
    config: Config = Field(description="What to train and how.")
    priority: int = Field(default=0, ge=-1000, le=1000, description="Higher runs start first.")
    max_restarts: int = Field(
        default=3, ge=0, le=100, description="Restarts after losses, counted since the last new checkpoint."
    )
    tags: list[Label] = Field(default_factory=list, max_length=MOST_TAGS)


class RunToEstimate(RunCreate):
    """A run that might be made."""

    probe: bool = Field(default=False, description="Measure it too: two steps on its longest rows, on a worker.")


class RunEdit(_Body):
    """What to change about a run; what is left out stays as it is."""

    model_config = ConfigDict(json_schema_extra={"example": {"name": "rank 8", "tags": ["demo"], "pinned": True}})

    name: Label | None = None
    tags: Annotated[list[Label], Field(max_length=MOST_TAGS)] | None = Field(default=None, description="All of them.")
    pinned: bool | None = Field(default=None, description="A pinned run is never deleted, by no policy either.")


class RunStop(_Body):
    """How to stop."""

    model_config = ConfigDict(json_schema_extra={"example": {"mode": "checkpoint"}})

    mode: StopMode | None = Field(
        default=None,
        description="`checkpoint` (the default): save, and end. `epoch_end`: train to the end of the epoch, save, and "
        "end; a later stop of another mode ends it at once. `best`: end at once where an evaluation has found a best "
        "checkpoint, which is then the one to resume from; otherwise as `checkpoint`. `discard`: end and save nothing.",
    )
    save_checkpoint: bool | None = Field(default=None, description="False: the mode `discard`.")

    @model_validator(mode="after")
    def _agree(self) -> "RunStop":
        if None not in (self.mode, self.save_checkpoint) and self.save_checkpoint is (self.mode == "discard"):
            raise ValueError(f"`save_checkpoint` contradicts the mode `{self.mode}`; leave `save_checkpoint` out")
        return self

    @property
    def how(self) -> StopMode:
        """The mode that is meant."""
        return self.mode or ("discard" if self.save_checkpoint is False else "checkpoint")


class RunResume(_Body):
    """Where to go on, and what to change."""

    model_config = ConfigDict(json_schema_extra={"example": {"config": {"epochs": 2}}})

    checkpoint_id: str | None = Field(
        default=None, max_length=100, description="None: the newest good one.", examples=[_CHECKPOINT_ID]
    )
    from_: Literal["start"] | None = Field(
        default=None, alias="from", description="`start`: from the first step, without any checkpoint."
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="Fields that change; the others stay as they were."
    )


class RunCheck(BaseModel):
    """What `POST /v1/runs` would say, and what the trainer would use."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "valid": True,
                "errors": [],
                "warnings": [
                    {
                        "field": "config.optim",
                        "code": "replaced",
                        "message": "`optim` will be `adamw_8bit`: Paging optimizer state needs a GPU.",
                    }
                ],
                "effective_config": {**_CONFIG, "load_in_4bit": True, "optim": "adamw_8bit"},
            }
        }
    )

    valid: bool
    errors: list[FieldError]
    warnings: list[FieldError]
    effective_config: Config | None = Field(description="Null while there are errors.")


class TrainingMetrics(BaseModel):
    """One point of the curves."""

    step: int
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    gpu_memory_mb: float | None = None
    samples_per_second: float | None = None
    extra: dict[str, Any] = Field(default_factory=dict)


class TrainingRun(BaseModel):
    """A run as every backend knows it."""

    run_id: str
    experiment_id: str
    config: Config = Field(description="As it was asked for, defaults included.")
    status: TrainingStatus = TrainingStatus.pending
    current_step: int = 0
    total_steps: int | None = None
    current_epoch: float = 0.0
    best_loss: float | None = None
    checkpoint_path: str | None = Field(
        default=None, description="Folder of the newest good checkpoint, on the storage of API and workers."
    )
    error_message: str | None = None


_RUN: JsonDict = {
    "id": RUN_ID, "run_id": RUN_ID, "experiment_id": _EXPERIMENT_ID, "name": "docstrings",
    "tags": ["demo"], "backend": "celery", "dataset_id": _DATASET_ID, "eval_dataset_id": None,
    "config": _CONFIG, "effective_config": None, "status": "running", "priority": 0,
    "max_restarts": 3, "parent_run_id": None, "resume_checkpoint_id": None, "base_run_id": None,
    "reward_run_ids": [], "attempt": 1, "worker_id": "wrk_01k3x9m6q2v8s4t0w7y5z1a3c0", "current_step": 40,
    "total_steps": 200, "current_epoch": 0.2, "best_loss": 2.31,
    "checkpoint_path": f"/srv/anneal/runs/{RUN_ID}/a1/checkpoint-40", "error_code": None,
    "pinned": False, "error_message": None, "fine_tuned_model": None, "last_seq": 57, "created_by": None,
    "created_at": "2026-01-02T03:04:05.678Z", "started_at": "2026-01-02T03:04:06.001Z",
    "finished_at": None, "stop_requested_at": None, "stop_mode": None,
    "prediction": {
        "start_at": "2026-01-02T03:04:06.001Z", "finish_at": "2026-01-02T03:19:00.000Z", "confidence": "high",
        "basis": "160 of 200 steps left, by its own speed, 5.4 s a step.",
    },
}  # fmt: skip


class RunSummary(TrainingRun):
    """A run in a list."""

    model_config = ConfigDict(json_schema_extra={"example": _RUN})

    id: str
    name: str
    tags: list[str]
    backend: str
    dataset_id: str
    eval_dataset_id: str | None
    effective_config: dict[str, Any] | None = Field(
        description="What the trainer really uses, told by it at its start."
    )
    priority: int
    max_restarts: int
    pinned: bool = Field(description="Whether it is kept, whatever the policy says of its age.")
    parent_run_id: str | None = Field(description="The run that this one resumes.")
    resume_checkpoint_id: str | None
    base_run_id: str | None = Field(description="The run whose output is the base model.")
    reward_run_ids: list[str] = Field(description="The runs whose reward models it learns from; oldest first.")
    attempt: int = Field(description="Tries so far; a lost worker costs one.")
    worker_id: str | None = Field(description="The worker that has it, or had it last.")
    error_code: str | None
    fine_tuned_model: str | None = Field(
        description="Folder of the adapter or model, on the storage of API and workers. "
        "As `base_model` of another run, name this run's id."
    )
    last_seq: int = Field(description="Newest event of the run.")
    created_by: str | None
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None
    stop_requested_at: Moment | None
    stop_mode: StopMode | None = Field(
        description="How it is to stop, or was; `epoch_end` while `stop_requested_at` is null: at the end of the epoch."
    )
    prediction: Prediction | None = Field(
        default=None,
        description="When it starts and finishes; null of runs that have ended, and where there is nothing to go by. "
        "Answers to requests for a run, a stop or a resume have none: they wait for nothing.",
    )


class RunRead(RunSummary):
    """A run with its newest metrics."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                **_RUN,
                "estimate": EXAMPLE,
                "measured": {
                    "peak_memory_mb": 15210.4, "reserved_memory_mb": 16022.0, "tokens_per_second": 7031.0,
                    "step_seconds": 0.39,
                },
                "probe": None,
                "metrics_history": [
                    {
                        "step": 40, "epoch": 0.2, "loss": 2.31, "learning_rate": 0.0002, "grad_norm": 0.9,
                        "gpu_memory_mb": None, "samples_per_second": 12.5, "extra": {},
                    }
                ],
            }
        }
    )  # fmt: skip

    estimate: RunEstimate | None = Field(
        description="What it was expected to take when it was created; comes a moment after that. Null for backends "
        "that load no model, and for runs that resume others."
    )
    measured: Measured | None = Field(description="What it has taken so far; null while nothing is measured.")
    probe: ProbeResult | None = Field(description="What it says about the run that it measures; null for all others.")
    metrics_history: list[TrainingMetrics] = Field(description="The last 100 points; GET …/metrics has all of them.")


class StopOutlook(BaseModel):
    """What is to be expected of a stop."""

    mode: StopMode = Field(description="That is in force: of two requests, the first, unless the later saves less.")
    save_seconds: float | None = Field(description="The slowest of the run's last five saves; null: it has none yet.")
    grace_seconds: float = Field(description="What a trainer gets to save and end; after that it is killed.")
    grace_suffices: bool | None = Field(
        description="Whether it does for the step at work, a save that may be on its way, and another one; null where "
        "that is not known, or nothing is to be saved."
    )
    message: str


_OUTLOOK: JsonDict = {
    "mode": "checkpoint", "save_seconds": 1.8, "grace_seconds": 120.0, "grace_suffices": True,
    "message": "It saves a checkpoint and ends; its saves took up to 1.8 s of the 120 s that there are.",
}  # fmt: skip


class RunStopped(RunRead):
    """A run that was asked to stop."""

    model_config = ConfigDict(json_schema_extra={"example": {**_RUN, "metrics_history": [], "stop": _OUTLOOK}})

    stop: StopOutlook


class Series(BaseModel):
    """One curve, thinned to what was asked for; its extremes are those of all its points."""

    steps: list[int]
    values: list[float | None] = Field(description="Null where the value was not a finite number.")
    min: float | None
    max: float | None


class RunMetrics(BaseModel):
    """The curves of a run."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "run_id": RUN_ID,
                "series": {"loss": {"steps": [10, 20], "values": [3.1, 2.31], "min": 2.31, "max": 3.1}},
            }
        }
    )

    run_id: str
    series: dict[str, Series]


_COMPARED: JsonDict = {
    "run_id": RUN_ID, "name": "rank 8", "experiment_id": _EXPERIMENT_ID, "status": "completed",
    "current_step": 200, "total_steps": 200, "best_loss": 1.93, "seconds": 81.5,
    "metrics": {"loss": {"last_step": 200, "last": 1.95, "min": 1.93, "max": 4.1}},
}  # fmt: skip


class Reached(BaseModel):
    """Where a series of metrics stands, and how far it went."""

    last_step: int | None
    last: float | None = Field(description="Null where it was no finite number.")
    min: float | None
    max: float | None


class ComparedRun(BaseModel):
    """What one run has reached."""

    run_id: str
    name: str
    experiment_id: str
    status: TrainingStatus
    current_step: int
    total_steps: int | None
    best_loss: float | None
    seconds: float | None = Field(description="From its first start to its end; null while it has not ended.")
    metrics: dict[str, Reached]


class RunComparison(BaseModel):
    """Runs side by side."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "runs": [_COMPARED, {**_COMPARED, "run_id": OTHER_RUN_ID, "name": "rank 16", "best_loss": 1.9}],
                "differences": {"config.lora_r": {RUN_ID: 8, OTHER_RUN_ID: 16}},
                "common": {"config.method": "qlora", "backend": "celery"},
            }
        }
    )

    runs: list[ComparedRun] = Field(description="In the order in which they were named.")
    differences: dict[str, dict[str, Any]] = Field(description="Fields that are not the same in all, by run.")
    common: dict[str, Any] = Field(description="Fields that are.")
