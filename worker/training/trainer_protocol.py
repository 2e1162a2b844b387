"""The part of a trainer that checkpointing, plugins and the helpers of the loop use."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState, TrainingArguments

from anneal.contracts.attempt.messages import AnsweredSaves
from anneal.contracts.stop import StopMode
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.measurement.memory import GpuMemory
from worker.training.measurement.step_phases import StepPhases
from worker.training.measurement.throughput import Throughput
from worker.training.model.parallel.sharding import Sharding


class SaveRequests(Protocol):
    """Actions that request a checkpoint."""

    def take_answered_saves(self) -> AnsweredSaves:
        """Return the requests that a reported checkpoint answers, as fields of its record."""
        ...

    def requeue_saves(self) -> None:
        """Let the next checkpoint answer the requests of the last one, which was never written."""

    def fail_saves(self, why: str) -> None:
        """Report that the requested checkpoints are not written."""


class ServiceTrainer(Protocol):
    """A trainer of TRL with the service's additions."""

    run: TrainingContext
    facts: dict[str, Any]
    replaced: list[Replacement]
    step_rows: list[int]
    """Row numbers of the current optimizer step."""
    skips_step: bool
    """The current step is skipped: an earlier attempt found it to be bad."""
    saved_step: int
    """Optimizer step of the last checkpoint; -1 before the first."""
    sharding: Sharding | None
    """Division of the model among the ranks."""
    throughput: Throughput
    gpu_memory: GpuMemory
    step_phases: StepPhases

    accelerator: Accelerator
    args: TrainingArguments
    control: TrainerControl
    data_collator: Callable[[list[dict[str, Any]]], Any]
    eval_dataset: Dataset | None
    lr_scheduler: LRScheduler
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    processing_class: PreTrainedTokenizerBase
    state: TrainerState

    @property
    def actions(self) -> SaveRequests:
        """Live actions that wait for a step."""
        ...

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        """Return the loss of a batch."""

    def compute_loss_context_manager(self) -> AbstractContextManager[None]:
        """Provide the precision of the forward pass."""
        ...

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler of the learning rate, and return it."""

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay."""
        ...

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]: ...

    def _save_rng_state(self, output_dir: str) -> None: ...

    def _save_scaler(self, output_dir: str) -> None: ...

    def end_early(self, why: str, mode: StopMode) -> None:
        """End training after the current step, with what the stop mode saves."""

    def evaluation_is_due(self) -> bool:
        """Return True if the configuration schedules an evaluation after the current step."""
        ...

    def metric_names(self) -> Mapping[str, str]:
        """Map the trainer's metric names to those of the service."""
        ...

    def sequences_of(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the training sequences that contain any of these rows."""
        ...

    def take_rows(self, inputs: Any) -> list[int]:
        """Remove the row numbers from a batch and return them."""
        ...

    def take_step(self) -> tuple[float, list[int]]:
        """Return loss and row numbers of the step just done."""
        ...

    def report_samples(self) -> None:
        """Report texts that the model generated since the last metric."""

    def trained_tokens(self) -> int:
        """Return the number of tokens trained on, without padding."""
        ...

    def pinned_text(self) -> list[int]:
        """Return the token ids whose loss the fidelity check compares."""
        ...

    def save_constant_files(self, folder: Path) -> None:
        """Write the files that every checkpoint of this process repeats."""

    def save_metric_averages(self) -> None:
        """Copy the trainer's running metric averages into the state that a checkpoint holds."""
