"""Interface of training backends."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.errors import FieldError
from anneal.contracts.fake_options import FakeOptions
from anneal.contracts.methods import TrainingMethod
from anneal.contracts.schemas.checkpoints import CheckpointExport
from anneal.contracts.schemas.estimates import RunEstimate
from anneal.contracts.schemas.runs.reads import TrainingRun
from anneal.contracts.schemas.runs.requests import EvaluationCreate, PredictionCreate, RunCreate, RunResume
from anneal.contracts.stop import StopMode

Transaction = TypeVar("Transaction")
"""A transaction of the service, with the caller on whose behalf it runs."""
Run = TypeVar("Run")
"""A stored run."""


class BackendCapabilities(BaseModel):
    """Capabilities of a backend."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(examples=["celery"])
    supports_local: bool = Field(description="True if runs can execute on the API's machine.")
    supports_remote: bool = Field(description="True if runs can execute on other machines that share the storage.")
    supports_distributed: bool = Field(description="True if one run can use several devices.")
    supported_methods: tuple[TrainingMethod, ...]
    max_model_size_b: float | None = Field(
        description="Estimated size, in billions of parameters, of the largest dense model that the best device of its "
        "online workers (the GPU with the most memory, else the CPU) trains by QLoRA on one row of 2,048 tokens at a "
        "time; null without such a worker, and for backends that load no model."
    )
    supported_quantization: tuple[Literal["4bit", "8bit"], ...]
    supports_streaming_logs: bool


@dataclass(frozen=True)
class BackendRules:
    """Validation rules of a backend; the caller reads everything that they need from the database."""

    capabilities: BackendCapabilities
    options: type[BaseModel] | None
    """Model of `extra`; None: the trainer's options defined in `runs.config`."""
    machine_matters: bool
    """True if the valid configurations depend on the worker's device."""
    loads_model: bool
    """True if `base_model` must exist; otherwise any name is accepted."""
    setting: Literal["ray_url", "fake_backend"] | None = None
    """Setting without which the backend is not available."""
    starts_workers: bool = False
    """True if a cluster starts a worker for each run; otherwise the workers that are online claim runs."""
    is_hidden: bool = False
    """True if the backend is not shown where it is not available."""


class TrainingBackend(ABC, Generic[Transaction, Run]):
    """Interface of a backend that executes runs; `tests/app/backends/conformance.py` specifies its behavior.

    `create_run`, `evaluate_model`, `predict_rows`, `stop_run`, `resume_run` and `export_checkpoint` are part of the
    caller's transaction; the endpoints use them. `launch`, `stop` and `resume` are the same calls in transactions of
    their own, for code that has none. Errors that a caller can act on are raised as `app.api.errors.ApiError`.
    """

    rules: BackendRules

    @property
    def capabilities(self) -> BackendCapabilities:
        """Capabilities of this backend."""
        return self.rules.capabilities

    @abstractmethod
    async def validate_config(self, config: Mapping[str, Any]) -> list[FieldError]:
        """Return all problems of a configuration as the user wrote it; empty if it can run."""

    @abstractmethod
    async def estimate_resources(self, config: Mapping[str, Any], dataset_size: int) -> RunEstimate:
        """Estimate time, memory by component, cost, tokens and steps for `dataset_size` rows, with assumptions.

        Values that cannot be estimated are null, with a reason. Raises 422 for a configuration that cannot run.
        """

    @abstractmethod
    async def create_run(self, transaction: Transaction, request: RunCreate, run_id: str | None = None) -> Run:
        """Create a pending run; workers are notified after the commit.

        The same idempotency key, or the same `run_id`, returns the same run. Raises 422 with all errors.
        """

    @abstractmethod
    async def evaluate_model(self, transaction: Transaction, request: EvaluationCreate) -> Run:
        """Create a pending run that evaluates a model; the same idempotency key returns the same run.

        Raises 422 with all errors.
        """

    @abstractmethod
    async def predict_rows(self, transaction: Transaction, request: PredictionCreate) -> Run:
        """Create a pending run in which a model answers rows; the same idempotency key returns the same run.

        Raises 422 with all errors.
        """

    @abstractmethod
    async def stop_run(
        self, transaction: Transaction, run_id: str, mode: StopMode, grace_seconds: float | None = None
    ) -> Run:
        """Request a stop of the run; raise 409 if it has already ended by itself.

        `grace_seconds` limit an immediate stop; None: the grace period of the settings.
        """

    @abstractmethod
    async def resume_run(self, transaction: Transaction, run_id: str, request: RunResume) -> Run:
        """Create a pending run that continues an ended one; the same idempotency key returns the same run.

        Raises 409 while the run is live or without a checkpoint, 422 for changes that cannot be made.
        """

    @abstractmethod
    async def export_checkpoint(
        self, transaction: Transaction, run_id: str, checkpoint_id: str, request: CheckpointExport
    ) -> Run:
        """Create a pending run whose output is the model of a checkpoint; the same idempotency key returns the same.

        Raises 409 while the run is live, 422 for an output that it cannot have or a backend without models.
        """

    @abstractmethod
    async def launch(self, run: TrainingRun, dataset_path: Path, output_dir: Path) -> str:
        """Accept a run and return its id; the run is durable before this returns, and repeated calls are idempotent.

        `dataset_path` is the file of a stored dataset, `output_dir` the run's folder in the storage.
        """

    @abstractmethod
    async def get_status(self, run_id: str) -> TrainingRun:
        """Return the current state of the run."""

    @abstractmethod
    def stream_logs(self, run_id: str) -> AsyncIterator[str]:
        """Yield log lines without line ends: stored lines first, then live ones until the run has ended."""

    @abstractmethod
    async def stop(self, run_id: str, save_checkpoint: bool = True) -> None:
        """Request a stop of the run; repeated requests have no effect."""

    @abstractmethod
    async def resume(self, run_id: str, checkpoint_path: Path | None = None) -> str:
        """Resume from a checkpoint of the run (None: the newest restorable one) as a new run; return its id."""


_CAPABILITIES = BackendCapabilities(
    name="celery",
    supports_local=True,
    supports_remote=True,
    supports_distributed=True,
    supported_methods=tuple(TrainingMethod),
    max_model_size_b=None,
    supported_quantization=("4bit", "8bit"),
    supports_streaming_logs=True,
)

_CELERY = BackendRules(capabilities=_CAPABILITIES, options=None, machine_matters=True, loads_model=True)

_FAKE = BackendRules(
    capabilities=_CAPABILITIES.model_copy(update={"name": "fake", "supports_distributed": False}),
    options=FakeOptions,
    machine_matters=False,
    loads_model=False,
    setting="fake_backend",
    is_hidden=True,
)

_RAY = BackendRules(
    capabilities=_CAPABILITIES.model_copy(update={"name": "ray", "supports_local": False}),
    options=None,
    machine_matters=True,
    loads_model=True,
    setting="ray_url",
    starts_workers=True,
)

BACKEND_RULES: Mapping[str, BackendRules] = {rules.capabilities.name: rules for rules in (_CELERY, _FAKE, _RAY)}
"""Rules of each backend, by its name."""
WORKER_BACKENDS = tuple(sorted(name for name, rules in BACKEND_RULES.items() if not rules.starts_workers))
"""Backends whose runs the workers that are online claim."""


class BackendRead(BackendCapabilities):
    """Backend and its capabilities."""

    model_config = ConfigDict(
        frozen=True,
        json_schema_extra={
            "example": {
                "id": "celery",
                "name": "celery",
                "supports_local": True,
                "supports_remote": True,
                "supports_distributed": True,
                "supported_methods": [method.value for method in TrainingMethod],
                "max_model_size_b": 119.7,
                "supported_quantization": ["4bit", "8bit"],
                "supports_streaming_logs": True,
                "unavailable_reason": None,
            }
        },
    )

    id: str
    unavailable_reason: str | None = Field(
        description="Why no run can be created for it, with the setting that is missing; null: it is available."
    )
