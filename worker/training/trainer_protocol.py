"""The part of a trainer that checkpointing, plugins and the helpers of the loop use."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from anneal.contracts.stop import StopMode
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext


class ServiceTrainer(Protocol):
    """A trainer of TRL with the service's additions; members without a precise type are those of transformers."""

    run: TrainingContext
    facts: dict[str, Any]
    replaced: list[Replacement]
    step_rows: list[int]
    """Row numbers of the current optimizer step."""
    skips_step: bool
    """The current step is skipped: an earlier attempt found it to be bad."""
    saved_step: int
    """Optimizer step of the last checkpoint; -1 before the first."""
    saving: Any
    """The `CheckpointSaver` of this run."""
    sharding: Any
    """The `Sharding` of the model among the ranks, or None."""
    actions: Any
    """Live actions that wait for a step."""
    plugin_callbacks: Any
    """The `PluginCallbacks` of this run."""
    throughput: Any
    gpu_memory: Any
    step_phases: Any

    accelerator: Any
    args: Any
    control: Any
    data_collator: Any
    eval_dataset: Any
    lr_scheduler: Any
    model: Any
    optimizer: Any
    processing_class: Any
    state: Any
    compute_loss: Any
    compute_loss_context_manager: Any
    create_scheduler: Any
    get_decay_parameter_names: Any
    _prepare_inputs: Any
    _save_rng_state: Any
    _save_scaler: Any

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
