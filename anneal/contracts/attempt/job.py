"""Job that a worker hands to a training process: the file `job.json` in the attempt's folder."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.attempt.device import AssignedDevice
from anneal.contracts.attempt.messages import ActionRequest
from anneal.contracts.attempt.repair import Repair
from anneal.contracts.field_types import JsonObject
from anneal.contracts.rewards import RewardHost
from anneal.contracts.run_task import RunTask

MERGED_BASE = "base_model"
"""Folder in an output, and name in its adapter's configuration, of a base model that exists only there."""

EXPORT = "export.json"
"""File of an output that says which weights it contains: `weights`, `step` and `reason`, as in the event `export`."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSource(_Part):
    """Dataset to read."""

    id: str
    path: Path
    format: str
    rows: int | None
    sha256: str | None
    """Digest of the file; None if it is unknown, so that its tokens are not cached."""


class ModelSource(_Part):
    """Location of a base model or reward model: a folder or a name on the hub."""

    name: str
    """Name as the user wrote it."""
    path: Path | None
    hub: str | None
    revision: str | None
    """Commit, branch or tag of a hub model."""
    base: "ModelSource | None" = None
    """Base of an adapter that is the output of a run, which names it as a user does."""

    @property
    def portable_name(self) -> str:
        """Name that means the same on other machines."""
        return self.hub or self.name


class ResumePoint(_Part):
    """Checkpoint to resume from."""

    path: Path
    step: int
    manifest_sha256: str


class EvaluatedCheckpoint(ResumePoint):
    """Checkpoint whose weights were evaluated."""

    metric: float
    """Evaluation metric of the method."""


class TrainedWeights(_Part):
    """Weights to use: the folder of a checkpoint or of an output."""

    path: Path
    step: int
    """Optimizer steps after which they were saved."""
    epoch: float


class TokenCacheLocation(_Part):
    """Folder in which training processes share tokenized data."""

    folder: Path
    limit_bytes: int


class TrackerServers(_Part):
    """Servers of experiment trackers."""

    mlflow_tracking_uri: str | None = None
    wandb_mode: str = "online"
    """Nothing is sent unless it is `online`."""


class WorkerInfo(_Part):
    """Worker that started the attempt."""

    id: str
    host: str


class JobSpec(_Part):
    """Everything that a training process needs to know about its attempt, except secrets."""

    run_id: str
    task: RunTask = RunTask.train
    attempt: int
    backend: Literal["celery", "fake", "ray"]
    config: JsonObject
    """Configuration of the run with repairs applied; the training process validates and resolves it."""
    user_set_fields: frozenset[str]
    """Fields of the configuration that the user or a repair has set."""
    auto_repairs: list[Repair] = Field(default_factory=list)
    """Repairs of earlier attempts, in order."""
    dataset: DataSource | None = None
    """Dataset to train on; for the tasks `evaluate` and `predict`, to use the weights on; None only for `serve`."""
    eval_dataset: DataSource | None = None
    extra_eval_datasets: dict[str, DataSource] = Field(default_factory=dict)
    """Further datasets to evaluate on, by the name in their metrics; no decision of the training depends on them."""
    base_model: ModelSource
    tokenizer: ModelSource | None = None
    """Model whose tokenizer is used; None: the base model."""
    reward_models: list[ModelSource] = Field(default_factory=list)
    """Models of the rewards of type `model`, in the order of these rewards."""
    reward_hosts: list[RewardHost] = Field(default_factory=list)
    """Hosts that rewards of the configuration call, as the operator allows them; no others are called."""
    teacher: ModelSource | None = None
    """Model whose next-token probabilities are learned."""
    attempt_dir: Path
    """Folder for the attempt's checkpoints and output."""
    journal: Path | None = None
    """File in which the attempts of the run record what ran when; None: they do not."""
    token_cache: TokenCacheLocation | None = None
    """None: tokenized data is not kept."""
    disk_reserve_bytes: int = 0
    """Free space that a checkpoint must leave on the disk."""
    resume_from: ResumePoint | None = None
    best_checkpoint: EvaluatedCheckpoint | None = None
    """Checkpoint with the best evaluation so far, for the output."""
    weights: TrainedWeights | None = None
    """Weights to use; None: those of the base model. Only for the tasks `evaluate`, `predict` and `serve`."""
    serve_idle_seconds: float = 300.0
    """Seconds without a question after which a process of task `serve` ends."""
    replayed_actions: list[ActionRequest] = Field(default_factory=list)
    """Actions that earlier attempts did after the step of `resume_from`, in order."""
    sharded: bool = False
    """True: weights, gradients and optimizer state are divided among the devices of the run."""
    sequence_parallel: int = 1
    """Number of devices that share each sequence; it divides the number of devices of the run."""
    shares_folder: bool = True
    """False: each host of the run has files of its own, at paths of its own, which it has fetched from the store."""
    expert_parallel: int = 1
    """Number of devices that share the experts of a layer; it divides the number of devices of the run."""
    device: AssignedDevice | None = None
    """None (a run by hand): a GPU if there is one."""
    trust_remote_code: bool = False
    hub_allowed: bool = True
    gguf_converter: Path | None = None
    """Converter of llama.cpp on this worker."""
    gguf_quantizer: Path | None = None
    """Quantizer of llama.cpp on this worker."""
    trackers: TrackerServers = TrackerServers()
    worker: WorkerInfo | None = None

    @property
    def datasets(self) -> list[DataSource]:
        """All datasets that the run trains or evaluates on."""
        sources = [self.dataset, self.eval_dataset, *self.extra_eval_datasets.values()]
        return [source for source in sources if source is not None]

    @property
    def models(self) -> list[ModelSource]:
        """All models whose weights the run loads."""
        return [self.base_model, *self.reward_models, *([self.teacher] if self.teacher else [])]

    def to_json(self) -> str:
        """Encode the job; inverse of `from_file`."""
        return self.model_dump_json(indent=1)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a job file.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is no valid job.
        """
        return cls.model_validate_json(path.read_bytes())
