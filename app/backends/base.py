"""What a place where runs can execute has to offer."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.estimates.schemas import RunEstimate
from app.runs.config import Problem, TrainingMethod
from app.runs.schemas import TrainingRun


class BackendCapabilities(BaseModel):
    """What a backend can run."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(examples=["celery"])
    supports_local: bool = Field(description="Runs on the machine of the API.")
    supports_remote: bool = Field(description="Runs on other machines that share the storage.")
    supports_distributed: bool = Field(description="Spreads one run over several devices.")
    supported_methods: tuple[TrainingMethod, ...]
    max_model_size_b: float | None = Field(description="Billions of parameters; null: no limit known.")
    supported_quantization: tuple[Literal["4bit", "8bit"], ...]
    supports_streaming_logs: bool


@dataclass(frozen=True)
class Rules:
    """How a backend judges a request, with everything read from the database by somebody else."""

    capabilities: BackendCapabilities
    options: type[BaseModel] | None
    """What `extra` may hold; None: the trainer's own options, which `runs.config` knows."""
    machine_matters: bool
    """Whether a worker's device decides about what a configuration may ask for."""
    loads_model: bool
    """Whether `base_model` must be there; otherwise any name will do."""


class TrainingBackend(ABC):
    """A place where runs execute; `tests/backends/conformance.py` says what each of them promises.

    Every method is one transaction of its own. What a caller can act on is raised as `app.errors.ApiError`.
    """

    rules: Rules

    @property
    def capabilities(self) -> BackendCapabilities:
        """What this backend can run."""
        return self.rules.capabilities

    @abstractmethod
    async def validate_config(self, config: Mapping[str, Any]) -> list[Problem]:
        """Every problem of a configuration as the user wrote it, at once; empty: it can run."""

    @abstractmethod
    async def estimate_resources(self, config: Mapping[str, Any], dataset_size: int) -> RunEstimate:
        """Time, memory by component, cost, tokens and steps for so many rows, with what was assumed.

        What cannot be known is null, with its reason. 422 for a configuration that could not run.
        """

    @abstractmethod
    async def launch(self, run: TrainingRun, dataset_path: Path, output_dir: Path) -> str:
        """Accept a run and answer its id; it is durable before this returns, and launching it again adds nothing.

        `dataset_path` is the file of a stored data set, `output_dir` the run's own folder in the storage.
        """

    @abstractmethod
    async def get_status(self, run_id: str) -> TrainingRun:
        """The run as it stands."""

    @abstractmethod
    def stream_logs(self, run_id: str) -> AsyncIterator[str]:
        """Log lines without line ends: stored ones first, then as they come, until the run has ended."""

    @abstractmethod
    async def stop(self, run_id: str, save_checkpoint: bool = True) -> None:
        """Ask the run to stop; asking again changes nothing."""

    @abstractmethod
    async def resume(self, run_id: str, checkpoint_path: Path | None = None) -> str:
        """Go on from a checkpoint of the run (None: the newest good one) as a new run; answers its id."""
