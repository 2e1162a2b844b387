"""Wire models of runs: in lists, alone, and with their attempts."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from anneal.contracts.errors import FieldError
from anneal.contracts.field_types import Timestamp
from anneal.contracts.methods import TrainingMethod
from anneal.contracts.run_status import EndReason, TrainingStatus
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.estimates import EXAMPLE, Measured, ProbeResult, RunEstimate
from anneal.contracts.schemas.runs.common import CONFIG, DATASET_ID, EXPERIMENT_ID, FACTS, RUN_ID, Config
from anneal.contracts.schemas.runs.placement import PendingReason, Requirements, Resources
from anneal.contracts.schemas.short_repr import ShortRepr
from anneal.contracts.stop import StopMode

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
    resources: Resources = Field(default_factory=Resources, description="Device that the run needs.")
    status: TrainingStatus = TrainingStatus.pending
    current_step: int = 0
    total_steps: int | None = None
    current_epoch: float = 0.0
    best_loss: float | None = None
    checkpoint_path: str | None = Field(
        default=None, description="Folder of the newest good checkpoint, a path or URL below `ANNEAL_STORAGE`."
    )
    error_message: str | None = None


_RUN: JsonDict = {
    "id": RUN_ID, "run_id": RUN_ID, "experiment_id": EXPERIMENT_ID, "name": "docstrings",
    "tags": ["demo"], "task": "train", "backend": "celery", "dataset_id": DATASET_ID, "eval_dataset_id": None,
    "method": "qlora", "base_model": "my-model", "extra_eval_datasets": {},
    "config": CONFIG, "effective_config": None, "status": "running", "priority": 0,
    "max_restarts": 3, "parent_run_id": None, "resume_checkpoint_id": None, "base_run_id": None,
    "reward_run_ids": [], "attempt": 1, "worker_id": "wrk_01k3x9m6q2v8s4t0w7y5z1a3c0", "current_step": 40,
    "total_steps": 200, "current_epoch": 0.2, "best_loss": 2.31, "best_eval": None,
    "resources": {"kind": None, "memory_mb": None, "devices": 1, "labels": []},
    "requirements": {
        "kind": None, "memory_mb": None, "estimated_mb": {"cpu": 9120, "cuda": 8714}, "labels": [],
        "gguf": False, "gguf_quantizer": False, "prefers_gpu": True,
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


class RunSummary(ShortRepr):
    """A run in a list."""

    model_config = ConfigDict(json_schema_extra={"example": _SUMMARY})

    id: str
    name: str
    tags: list[str]
    task: RunTask = Field(
        description="`train`; `evaluate`: an evaluation without training; `export`: the output of a checkpoint; "
        "`predict`: answers to the rows of a dataset; `serve`: answers to questions over HTTP."
    )
    status: TrainingStatus
    method: TrainingMethod
    base_model: str
    experiment_id: str
    backend: str
    dataset_id: str | None = Field(description="ID of the dataset; null only for the task `serve`.")
    eval_dataset_id: str | None
    priority: int
    pinned: bool = Field(description="Protected from deletion and from retention.")
    parent_run_id: str | None = Field(description="The run that this one resumes, or whose checkpoint it uses.")
    base_run_id: str | None = Field(description="The run whose output is the base model, or is used.")
    attempt: int = Field(description="Number of attempts so far; a lost worker costs one.")
    worker_id: str | None = Field(description="Worker that has the run, or had it last.")
    current_step: int = 0
    total_steps: int | None = None
    current_epoch: float = 0.0
    best_loss: float | None = None
    best_eval: float | None = Field(
        description="Best `eval_loss` so far (`rlhf`: `eval_reward`; a prediction: `eval_score`), by which runs of a "
        "method are compared; null without an evaluation."
    )
    pending_reason: PendingReason | None = Field(
        description="Reason why no online worker can take it, at most a few seconds old; null if it waits for its turn "
        "or does not wait."
    )
    end_reason: EndReason | None = Field(
        description="Reason for which a completed run ended: `finished` (its last step), `early_stopping`, "
        "`callback` (an installed plugin), `time_limit` (`time_limit_seconds`) or `stop_at_step`; null for other runs."
    )
    error_code: str | None
    error_message: str | None = None
    fine_tuned_model: str | None = Field(
        description="Folder of the output, a path or URL below `ANNEAL_STORAGE`: the adapter or model, or the answers "
        "of a prediction. "
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
    reward_run_ids: list[str] = Field(
        description="Runs whose outputs are its reward models or its teacher, oldest first."
    )
    resources: Resources = Field(
        description="Resources that the request asked for, with the number of devices that `all` stands for."
    )
    requirements: Requirements = Field(description="Conditions that a device must meet to take it.")


class RunRow(BaseModel):
    """A run in a table of many; values that are not known are absent."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": RUN_ID, "name": "docstrings", "status": "running", "method": "qlora",
                "base_model": "Qwen/Qwen3-0.6B", "experiment_id": EXPERIMENT_ID, "tags": ["demo"], "step": 40,
                "total_steps": 200, "learning_rate": 0.0002, "best_loss": 2.31, "worker": "gpu-1", "by": "laptop",
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
    learning_rate: float | None = Field(default=None, description="Peak learning rate in effect.")
    best_loss: float | None = Field(default=None, description="Lowest logged loss.")
    best_eval: float | None = Field(default=None, description="Best `eval_loss` (`rlhf`: `eval_reward`).")
    tokens_per_second: int | None = Field(default=None, description="Newest measured speed.")
    losses: list[float | None] = Field(
        default_factory=list,
        max_length=32,
        description="Up to 32 losses from the first step to the newest, with three digits; null for a value "
        "that was not finite. Of steps that were trained twice, the newest pass counts.",
    )
    rewards: list[float | None] = Field(
        default_factory=list, max_length=32, description="For `rlhf`, rewards in place of `losses`."
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
                "facts": FACTS,
                "replaced": [
                    {
                        "field": "optim", "requested": "paged_adamw_8bit", "used": "adamw_8bit",
                        "reason": "Paging optimizer state needs a GPU.",
                    }
                ],
                "warnings": [],
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

    facts: dict[str, Any] | None = Field(
        description="Run facts as the trainer reported them last, in the event `config`: what computes the run "
        "(`device`, `attention`, `kernels`), the planned step (`step_plan`) and more. Null before they are reported, "
        "and when retention has deleted the event."
    )
    replaced: list[dict[str, Any]] = Field(
        description="Defaults that the device, the model or the method cannot honor, as the trainer reported them with "
        "`facts`: `field`, `requested`, `used` and `reason`."
    )
    warnings: list[FieldError] = Field(
        description="Warnings of its validation, as `POST /v1/runs/validate` returns them. Those about workers and "
        "devices are absent once it has started."
    )
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
        description="Metrics of a run that only evaluates or predicts, by name; null before its end and for other runs."
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

    model_config = ConfigDict(
        json_schema_extra={"example": {**_RUN, "replaced": [], "warnings": [], "metrics_history": [], "stop": _OUTLOOK}}
    )

    stop: StopOutlook


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
