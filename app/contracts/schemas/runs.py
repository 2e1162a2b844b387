"""Wire schemas of runs."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from app.contracts.errors import FieldError
from app.contracts.field_types import EvaluationSetName, Timestamp
from app.contracts.methods import TrainingMethod
from app.contracts.run_status import EndReason, TrainingStatus
from app.contracts.run_task import RunTask
from app.contracts.schemas.estimates import EXAMPLE, Measured, ProbeResult, RunEstimate
from app.contracts.stop import StopMode
from app.contracts.training_config.fields import TrainingConfig

Confidence = Literal["low", "medium", "high"]


class Prediction(BaseModel):
    """Predicted start and finish of a run, based on the history of this installation."""

    start_at: Timestamp | None = Field(
        description="Predicted or actual start; null if no worker could take it, or if it is unknown when one is free."
    )
    finish_at: Timestamp | None = Field(description="Predicted finish; null if there is no basis for it yet.")
    confidence: Confidence = Field(
        description="`high`: based on its own speed over at least a tenth of its steps, and on similar runs for the "
        "rest; `medium`: on its own speed, or on runs with the same configuration; `low`: a rough estimate."
    )
    basis: str = Field(description="Basis of the prediction, in a sentence.")


RUN_ID = "run_01k3x9m6q2v8s4t0w7y5z1a3b6"

OTHER_RUN_ID = "run_01k3x9m6q2v8s4t0w7y5z1a3c7"

_DATASET_ID = "ds_01k3x9m6q2v8s4t0w7y5z1a3b7"

_CHECKPOINT_ID = "ckpt_01k3x9m6q2v8s4t0w7y5z1a3b8"

_EXPERIMENT_ID = "exp_01k3x9m6q2v8s4t0w7y5z1a3b9"

_CONFIG: JsonDict = {"base_model": "my-model", "method": "qlora", "lora_r": 16, "epochs": 1}

MOST_TAGS = 50

MOST_EXTRA_EVAL_DATASETS = 16

Label = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""A name or tag."""


class _DocumentedAs:
    """Documents a value with the schema of `model`; the service validates it itself, to report all errors at once."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(self._model.__pydantic_core_schema__)


def _limited(config: dict[str, Any]) -> dict[str, Any]:
    size = len(json.dumps(config, ensure_ascii=False))
    if size > _MOST_CONFIG_CHARACTERS:
        message = "has {size} characters as JSON, and may have {most}: shorten its patterns, schemas and options"
        raise PydanticCustomError(
            "config_too_large", message, {"size": f"{size:,}", "most": f"{_MOST_CONFIG_CHARACTERS:,}"}
        )
    return config


_MOST_CONFIG_CHARACTERS = 64 * 1024
"""Length of a configuration as JSON; a page of a list has two hundred of them."""
Config = Annotated[dict[str, Any], _DocumentedAs(TrainingConfig)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


WorkerLabel = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/=-]{0,62}$")]
"""Label of a worker, such as `site-b` or `gpu=h100`."""


class Resources(_Body):
    """Resources that a run asks for; what it leaves out follows from its configuration and its estimate."""

    kind: Literal["cpu", "cuda"] | None = Field(
        default=None,
        description="Kind of device; null: a GPU if the backend has had a worker with one within the last hour, or if "
        "the configuration needs one, else a CPU.",
    )
    memory_mb: int | None = Field(
        default=None,
        ge=1,
        le=2**24,
        description="Least memory of the device in MiB; null: the estimate, where there is one.",
    )
    devices: int = Field(default=1, ge=1, le=1024, description="Number of devices; this version accepts only 1.")
    labels: list[WorkerLabel] = Field(
        default_factory=list,
        max_length=20,
        description="Labels that the worker must have, all of them; an operator sets them in `ANNEAL_WORKER_LABELS`.",
    )


class Requirements(BaseModel):
    """Conditions that a device must meet to take the run."""

    kind: Literal["cpu", "cuda"] | None = Field(default=None, description="Kind of device; null: see `prefers_gpu`.")
    memory_mb: int | None = Field(default=None, description="Memory that the request asked for, in MiB.")
    estimated_mb: dict[str, int] = Field(
        default_factory=dict,
        description="Least memory in MiB by kind of device, from the estimate; counts if `memory_mb` is null. With "
        "`on_out_of_memory: repair` it is that of one row at a time.",
    )
    labels: list[str] = Field(default_factory=list, description="Labels that the worker must have.")
    gguf: bool = Field(default=False, description="True: the worker must have the converter of llama.cpp.")
    prefers_gpu: bool = Field(
        default=False, description="True: a CPU takes it only if the backend has had no GPU within the last hour."
    )


class PendingReason(BaseModel):
    """Reason why no online worker can take a pending run."""

    code: Literal[
        "no_worker",
        "no_device_of_kind",
        "no_worker_with_labels",
        "no_gguf_converter",
        "no_device_fits",
        "devices_paused",
        "queued",
    ] = Field(
        description="`no_worker`: no worker of its backend is online; `no_device_of_kind`, `no_worker_with_labels`, "
        "`no_gguf_converter`, `no_device_fits`: none meets its requirements; `devices_paused`: those that do are "
        "paused after an error, or while other programs use their memory. `queued` (events only): one can take it "
        "again."
    )
    message: str = Field(description="The reason in a sentence, with what to do.")


class RunCreate(_Body):
    """Request to create a run."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "name": "docstrings", "dataset_id": _DATASET_ID, "backend": "celery", "config": _CONFIG,
                "tags": ["demo"],
            }
        }
    )  # fmt: skip

    experiment_id: str | None = Field(
        default=None, max_length=100, description="ID of the experiment; null: the experiment `default`."
    )
    name: Label | None = Field(default=None, description="Name of the run; null: method and base model.")
    backend: str = Field(default="celery", max_length=100, description="Training backend; GET /v1/backends lists them.")
    dataset_id: str = Field(max_length=100, description="ID of the dataset to train on.")
    eval_dataset_id: str | None = Field(
        default=None, max_length=100, description="ID of the dataset to evaluate on, every `eval_steps`."
    )
    extra_eval_datasets: dict[EvaluationSetName, Annotated[str, StringConstraints(max_length=100)]] = Field(
        default_factory=dict,
        max_length=MOST_EXTRA_EVAL_DATASETS,
        description="IDs of further datasets to evaluate on, by a name of `a-z`, `0-9` and `_`: each evaluation also "
        "reports `eval_<name>_loss` and the other metrics of each. `eval_dataset_id` or `eval_split` must be set too, "
        "and alone decides about the best checkpoint and early stopping.",
    )
    config: Annotated[Config, AfterValidator(_limited)] = Field(
        description="Training configuration; at most 65,536 characters of JSON."
    )
    priority: int = Field(default=0, ge=-1000, le=1000, description="Runs with higher priority start first.")
    max_restarts: int = Field(
        default=3, ge=0, le=100, description="Maximum restarts after losses, counted since the last new checkpoint."
    )
    resources: Resources = Field(default_factory=Resources, description="Device that the run needs.")
    tags: list[Label] = Field(default_factory=list, max_length=MOST_TAGS)


class EvaluationCreate(_Body):
    """Request to evaluate a model."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": RUN_ID, "dataset_id": _DATASET_ID, "config": {"max_eval_rows": 500}, "tags": ["demo"]}
        }
    )

    model: str = Field(
        min_length=1,
        max_length=300,
        description="Model to evaluate: `run_…` for the output of a run, `ckpt_…` for a checkpoint, otherwise a base "
        "model as in `config.base_model` of a run.",
    )
    dataset_id: str = Field(max_length=100, description="ID of the dataset to evaluate on.")
    config: Annotated[dict[str, Any], AfterValidator(_limited)] = Field(
        default_factory=dict,
        description="Fields of the training configuration. For a run or checkpoint only `max_eval_rows`, `seed`, "
        "`extra.eval_batch_size` and `extra.metrics`: the others are those of the run. For a base model also `method` "
        "and its options, which determine the loss and the metrics; the default is `full`.",
    )
    experiment_id: str | None = Field(
        default=None,
        max_length=100,
        description="ID of the experiment; null: that of the run, for a base model the experiment `default`.",
    )
    name: Label | None = Field(default=None, description="Name of the evaluation; null: it names the model.")
    resources: Resources = Field(default_factory=Resources, description="Device that the evaluation needs.")
    priority: int = Field(default=0, ge=-1000, le=1000, description="Runs with higher priority start first.")
    tags: list[Label] = Field(default_factory=list, max_length=MOST_TAGS)


class RunToEstimate(RunCreate):
    """Request to estimate a run."""

    probe: bool = Field(default=False, description="Also measure two steps on its longest rows, on a worker.")


class RunEdit(_Body):
    """Changes to a run; omitted fields stay unchanged."""

    model_config = ConfigDict(json_schema_extra={"example": {"name": "rank 8", "tags": ["demo"], "pinned": True}})

    name: Label | None = None
    tags: Annotated[list[Label], Field(max_length=MOST_TAGS)] | None = Field(
        default=None, description="Replaces all tags."
    )
    pinned: bool | None = Field(default=None, description="A pinned run is never deleted, not even by retention.")


class RunStop(_Body):
    """Request to stop a run."""

    model_config = ConfigDict(json_schema_extra={"example": {"mode": "checkpoint"}})

    mode: StopMode | None = Field(
        default=None,
        description="`checkpoint` (default): save and end. `epoch_end`: train to the end of the epoch, save and end; a "
        "later stop with another mode ends it at once. `best`: end at once if an evaluation has found a best "
        "checkpoint, from which the run can be resumed; otherwise like `checkpoint`. `discard`: end without saving.",
    )
    save_checkpoint: bool | None = Field(default=None, description="False: mode `discard`.")
    deadline_seconds: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds that the trainer has to finish its step and to save before it is killed; null: the grace "
        "period of the service. Not with `epoch_end`. A later request may set another one.",
    )

    @model_validator(mode="after")
    def _agree(self) -> "RunStop":
        if self.mode == "epoch_end" and self.deadline_seconds is not None:
            raise ValueError("`deadline_seconds` has no effect with the mode `epoch_end`; leave it out")
        if None not in (self.mode, self.save_checkpoint) and self.save_checkpoint is (self.mode == "discard"):
            raise ValueError(f"`save_checkpoint` contradicts the mode `{self.mode}`; leave `save_checkpoint` out")
        return self

    @property
    def how(self) -> StopMode:
        """Stop mode that the request asks for."""
        return self.mode or ("discard" if self.save_checkpoint is False else "checkpoint")


class RunResume(_Body):
    """Request to resume a run."""

    model_config = ConfigDict(json_schema_extra={"example": {"config": {"epochs": 2}}})

    checkpoint_id: str | None = Field(
        default=None,
        max_length=100,
        description="Checkpoint to resume from; null: the newest good one.",
        examples=[_CHECKPOINT_ID],
    )
    from_: Literal["start"] | None = Field(
        default=None, alias="from", description="`start`: train from the first step, without a checkpoint."
    )
    config: Annotated[dict[str, Any], AfterValidator(_limited)] = Field(
        default_factory=dict, description="Fields to change; the others stay unchanged."
    )
    stop_after_steps: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Save and stop after so many further steps; sets `stop_at_step`, counted from the checkpoint.",
    )
    resources: Resources | None = Field(
        default=None, description="Device that the new run needs; null: as the resumed run asked for."
    )

    @model_validator(mode="after")
    def _agree(self) -> "RunResume":
        if self.stop_after_steps is not None and self.config.get("stop_at_step") is not None:
            raise ValueError("`stop_after_steps` and `config.stop_at_step` say the same; leave one of them out")
        return self


class RunCheck(BaseModel):
    """Result of validating a run: errors, warnings and the effective configuration."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "valid": True,
                "errors": [],
                "warnings": [
                    {
                        "field": "config.optim",
                        "code": "replaced",
                        "message": "`optim` will be `adamw_8bit` instead of `paged_adamw_8bit`: "
                        "Paging optimizer state needs a GPU.",
                    }
                ],
                "effective_config": {**_CONFIG, "load_in_4bit": True, "optim": "adamw_8bit"},
            }
        }
    )

    valid: bool
    errors: list[FieldError]
    warnings: list[FieldError]
    effective_config: Config | None = Field(description="Effective configuration; null if there are errors.")


class TrainingMetrics(BaseModel):
    """Metrics of one step."""

    step: int = Field(description="Optimizer steps of the run so far, this one included.")
    epoch: float | None = Field(default=None, description="Passes over the data so far, with the fraction.")
    loss: float | None = Field(
        default=None, description="Mean loss of the steps since the last metric, in the unit of the method's loss."
    )
    learning_rate: float | None = Field(default=None, description="Learning rate of the step.")
    grad_norm: float | None = Field(default=None, description="L2 norm of the gradients before clipping.")
    gpu_memory_mb: float | None = Field(
        default=None, description="Peak GPU memory since the last metric, in MiB; null without a GPU."
    )
    samples_per_second: float | None = Field(
        default=None,
        description="Rows trained per second since the last metric, without the time of saves and evaluations.",
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="Further measurements by name, such as `tokens_per_second` or `mfu`."
    )


class TrainingRun(BaseModel):
    """Fields of a run that every backend has."""

    run_id: str
    experiment_id: str
    config: Config = Field(description="Requested configuration, with defaults.")
    status: TrainingStatus = TrainingStatus.pending
    current_step: int = 0
    total_steps: int | None = None
    current_epoch: float = 0.0
    best_loss: float | None = None
    checkpoint_path: str | None = Field(
        default=None, description="Folder of the newest good checkpoint, on the storage shared by API and workers."
    )
    error_message: str | None = None


_RUN: JsonDict = {
    "id": RUN_ID, "run_id": RUN_ID, "experiment_id": _EXPERIMENT_ID, "name": "docstrings",
    "tags": ["demo"], "task": "train", "backend": "celery", "dataset_id": _DATASET_ID, "eval_dataset_id": None,
    "method": "qlora", "base_model": "my-model", "extra_eval_datasets": {},
    "config": _CONFIG, "effective_config": None, "status": "running", "priority": 0,
    "max_restarts": 3, "parent_run_id": None, "resume_checkpoint_id": None, "base_run_id": None,
    "reward_run_ids": [], "attempt": 1, "worker_id": "wrk_01k3x9m6q2v8s4t0w7y5z1a3c0", "current_step": 40,
    "total_steps": 200, "current_epoch": 0.2, "best_loss": 2.31, "best_eval": None,
    "resources": {"kind": None, "memory_mb": None, "devices": 1, "labels": []},
    "requirements": {
        "kind": None, "memory_mb": None, "estimated_mb": {"cpu": 9120, "cuda": 8714}, "labels": [],
        "gguf": False, "prefers_gpu": True,
    },
    "pending_reason": None,
    "checkpoint_path": f"/srv/anneal/runs/{RUN_ID}/a1/checkpoint-40", "end_reason": None, "error_code": None,
    "pinned": False, "error_message": None, "fine_tuned_model": None, "last_seq": 57, "created_by": None,
    "created_at": "2026-01-02T03:04:05.678Z", "started_at": "2026-01-02T03:04:06.001Z",
    "finished_at": None, "stop_requested_at": None, "stop_mode": None,
    "prediction": {
        "start_at": "2026-01-02T03:04:06.001Z", "finish_at": "2026-01-02T03:19:00.000Z", "confidence": "high",
        "basis": "160 of 200 steps left, based on its own speed, 5.4 s per step.",
    },
}  # fmt: skip
_ONLY_FULL = (
    "run_id", "config", "effective_config", "checkpoint_path", "extra_eval_datasets", "max_restarts",
    "resume_checkpoint_id", "reward_run_ids", "resources", "requirements",
)  # fmt: skip
_SUMMARY: JsonDict = {name: value for name, value in _RUN.items() if name not in _ONLY_FULL}


class RunSummary(BaseModel):
    """A run in a list."""

    model_config = ConfigDict(json_schema_extra={"example": _SUMMARY})

    id: str
    name: str
    tags: list[str]
    task: RunTask = Field(
        description="`train`; `evaluate`: an evaluation without training; `export`: the output of a checkpoint."
    )
    status: TrainingStatus
    method: TrainingMethod
    base_model: str
    experiment_id: str
    backend: str
    dataset_id: str
    eval_dataset_id: str | None
    priority: int
    pinned: bool = Field(description="Protected from deletion and from retention.")
    parent_run_id: str | None = Field(description="The run that this one resumes, or whose checkpoint it evaluates.")
    base_run_id: str | None = Field(description="The run whose output is the base model, or is evaluated.")
    attempt: int = Field(description="Number of attempts so far; a lost worker costs one.")
    worker_id: str | None = Field(description="Worker that has the run, or had it last.")
    current_step: int = 0
    total_steps: int | None = None
    current_epoch: float = 0.0
    best_loss: float | None = None
    best_eval: float | None = Field(
        description="Best `eval_loss` so far (`rlhf`: `eval_reward`), by which runs of a method are compared; null "
        "without an evaluation."
    )
    pending_reason: PendingReason | None = Field(
        description="Reason why no online worker can take it, at most a few seconds old; null if it waits for its turn "
        "or does not wait."
    )
    end_reason: EndReason | None = Field(
        description="Reason for which a completed run ended: `finished` (its last step), `early_stopping`, "
        "`time_limit` (`time_limit_seconds`) or `stop_at_step`; null for other runs."
    )
    error_code: str | None
    error_message: str | None = None
    fine_tuned_model: str | None = Field(
        description="Folder of the adapter or model, on the storage shared by API and workers. "
        "To train another run on it, use this run's id as `base_model`."
    )
    last_seq: int = Field(description="`seq` of the newest event of the run.")
    created_by: str | None
    created_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None
    stop_requested_at: Timestamp | None
    stop_mode: StopMode | None = Field(
        description="Requested stop mode; `epoch_end` with `stop_requested_at` null: it stops at the end of the epoch."
    )
    prediction: Prediction | None = Field(
        default=None,
        description="Predicted start and finish; null for runs that have ended, and if there is no basis for it. "
        "Responses that create, stop or resume a run have none, so that they do not wait for it.",
    )


class RunFull(RunSummary, TrainingRun):
    """A run in a list with `view=full`: also its configuration and what it requires."""

    model_config = ConfigDict(json_schema_extra={"example": _RUN})

    extra_eval_datasets: dict[str, str] = Field(description="IDs of further evaluation datasets by name.")
    effective_config: dict[str, Any] | None = Field(description="Configuration that the trainer reported at its start.")
    max_restarts: int
    resume_checkpoint_id: str | None
    reward_run_ids: list[str] = Field(description="Runs whose outputs are its reward models, oldest first.")
    resources: Resources = Field(description="Resources that the request asked for.")
    requirements: Requirements = Field(description="Conditions that a device must meet to take it.")


class RunRow(BaseModel):
    """A run in a table of many; values that are not known are absent."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": RUN_ID, "name": "docstrings", "status": "running", "method": "qlora",
                "base_model": "Qwen/Qwen3-0.6B", "experiment_id": _EXPERIMENT_ID, "tags": ["demo"], "step": 40,
                "total_steps": 200, "best_loss": 2.31, "worker": "gpu-1", "by": "laptop",
                "created_at": "2026-01-02T03:04:05Z", "started_at": "2026-01-02T03:04:06Z",
                "finishes_at": "2026-01-02T03:19:00Z", "losses": [3.1, 2.6, 2.31], "tokens_per_second": 7031,
            }
        }
    )  # fmt: skip

    id: str
    name: str
    task: RunTask = Field(default=RunTask.train, description="Absent for a training.")
    status: TrainingStatus
    method: str
    base_model: str
    experiment_id: str
    tags: list[str] = []
    step: int = Field(default=0, description="Optimizer steps so far.")
    total_steps: int | None = None
    best_loss: float | None = Field(default=None, description="Lowest logged loss.")
    best_eval: float | None = Field(default=None, description="Best `eval_loss` (`rlhf`: `eval_reward`).")
    tokens_per_second: int | None = Field(default=None, description="Newest measured speed.")
    losses: list[float | None] = Field(
        default_factory=list,
        max_length=32,
        description="Up to 32 losses from the first step to the newest, with three digits; null for a value "
        "that was not finite. Of steps that were trained twice, the newest pass counts.",
    )
    reason: str | None = Field(
        default=None, description="Error code of a failed run, or `code` of the `pending_reason` of a pending one."
    )
    end_reason: EndReason | None = Field(default=None, description="Absent for a run that reached its last step.")
    worker: str | None = Field(default=None, description="Host of the worker that has the run, or had it last.")
    by: str | None = Field(default=None, description="Name of the API key that created it.")
    created_at: Timestamp
    started_at: Timestamp | None = None
    finished_at: Timestamp | None = None
    starts_at: Timestamp | None = Field(default=None, description="Predicted start of a pending run.")
    finishes_at: Timestamp | None = Field(default=None, description="Predicted finish.")


class RunCounts(BaseModel):
    """Numbers of runs."""

    model_config = ConfigDict(json_schema_extra={"example": {"counts": {"running": 2, "completed": 40}, "total": 42}})

    counts: dict[TrainingStatus, int] = Field(description="By status; a status without runs is absent.")
    total: int


class RunRead(RunFull):
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
                "evaluation": None,
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
        description="Estimate of its memory and time, available shortly after its creation. Null for backends "
        "that load no model, and for runs that resume others."
    )
    measured: Measured | None = Field(
        description="Measured memory and speed so far; null if nothing has been measured."
    )
    probe: ProbeResult | None = Field(
        description="Result of a probe for the run that it measures; null for other runs."
    )
    evaluation: dict[str, float | None] | None = Field(
        description="Metrics of a run that only evaluates, by name; null before its end and for other runs."
    )
    metrics_history: list[TrainingMetrics] = Field(
        description="The last 100 points; GET …/metrics returns all of them."
    )


class StopOutlook(BaseModel):
    """Expected result of a stop."""

    mode: StopMode = Field(description="Mode in effect: of two requests, the first, unless the later one saves less.")
    save_seconds: float | None = Field(
        description="Duration of the slowest of the run's last five saves; null if it has none."
    )
    grace_seconds: float = Field(description="Time for the trainer to save and end before it is killed.")
    grace_suffices: bool | None = Field(
        description="True if it is enough for the current step, a save that may be in progress, and another one; null "
        "if that is unknown, or nothing will be saved."
    )
    message: str


_OUTLOOK: JsonDict = {
    "mode": "checkpoint", "save_seconds": 1.8, "grace_seconds": 120.0, "grace_suffices": True,
    "message": "It saves a checkpoint and ends. Its saves took up to 1.8 s; with the current step and a save in "
    "progress, the stop takes 4.0 of 120 s.",
}  # fmt: skip


class RunStopped(RunRead):
    """A run with a requested stop."""

    model_config = ConfigDict(json_schema_extra={"example": {**_RUN, "metrics_history": [], "stop": _OUTLOOK}})

    stop: StopOutlook


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


class RunMetrics(BaseModel):
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


_COMPARED: JsonDict = {
    "run_id": RUN_ID, "name": "rank 8", "experiment_id": _EXPERIMENT_ID, "status": "completed",
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
    status: TrainingStatus
    current_step: int
    total_steps: int | None
    best_loss: float | None
    seconds: float | None = Field(description="Seconds from its first start to its end; null while it has not ended.")
    metrics: dict[str, Reached]


class RunComparison(BaseModel):
    """Comparison of runs."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "runs": [_COMPARED, {**_COMPARED, "run_id": OTHER_RUN_ID, "name": "rank 16", "best_loss": 1.9}],
                "differences": {"config.lora_r": {RUN_ID: 8, OTHER_RUN_ID: 16}},
                "common": {"config.method": "qlora", "backend": "celery"},
            }
        }
    )

    runs: list[ComparedRun] = Field(description="In the requested order.")
    differences: dict[str, dict[str, Any]] = Field(description="Fields whose values differ, by run.")
    common: dict[str, Any] = Field(description="Fields whose values are the same in all runs.")


class AttemptRead(BaseModel):
    """Attempt of a run on one worker."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "attempt": 1, "worker_id": "wrk_01k3x9m6q2v8s4t0w7y5z1a3c0", "worker": "gpu-1", "start_step": 0,
                "started_at": "2026-01-02T03:04:06.001Z", "ended_at": None, "outcome": None,
            }
        }
    )  # fmt: skip

    attempt: int
    worker_id: str
    worker: str | None = Field(description="Host of the worker; null for a worker that is no longer known.")
    start_step: int | None = Field(description="Step from which it trained; null if it ended before.")
    started_at: Timestamp
    ended_at: Timestamp | None
    outcome: str | None = Field(
        description="`completed`, `failed`, `cancelled`, `lost`, `handed_back`, `retried` or `repaired`; null: not "
        "ended."
    )
