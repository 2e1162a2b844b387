"""Weights of a trainer's model: divided among the ranks, loaded from a checkpoint, and gathered for the output."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer

from anneal.contracts.attempt.job import TrainedWeights
from worker.training.checkpointing import fidelity_check
from worker.training.context import TrainingContext
from worker.training.failures import TrainingFailure
from worker.training.loop import loss_check
from worker.training.model.checked_weights import check_keys, checked_adapters, checked_sizes
from worker.training.model.experts import expert_modules, load_experts
from worker.training.model.parallel.expert_parallel import division_obstacle as expert_obstacle
from worker.training.model.parallel.sharding import Sharding

_CHECKPOINT = "The checkpoint"
"""Subject of messages about its weights."""


class WeightsMixin(Trainer):  # type: ignore[misc]
    """Part of `ServiceTrainerMixin` that prepares the model for the first step and provides its weights."""

    run: TrainingContext
    sharding: Sharding | None = None
    """Division of the model among the ranks, once it is divided."""

    def __init__(self, **options: Any) -> None:
        self.whole_weights: dict[str, torch.Tensor] | None = None
        """Last weights of a sharded model, gathered for the output."""
        self.first_values: dict[str, torch.Tensor] = {}
        """First values of an adapter that changed the base weights, for checkpoints and the output."""
        super().__init__(**options)

    def prepare_model(self) -> None:
        """Make the loaded model ready for the first forward pass of all ranks."""
        if self.run.is_sharded:
            self.shard_model()
        if not self.run.method.has_reward_head:
            loss_check.check_loss(self, self.run.config.generation.temperature if self.run.config.generation else 1.0)

    def shard_model(self) -> None:
        """Divide the model among the ranks, with the weights of the checkpoint to resume from.

        Raises:
            TrainingFailure: `config_error`, if the model computes something else then, or this GPU lacks bfloat16, or
                its experts cannot be divided as requested.
        """
        if self.args.fp16:
            raise TrainingFailure(
                "config_error", "A sharded run needs a GPU with bfloat16: set `resources.sharding` to `none`."
            )
        experts = self.run.job.expert_parallel
        if experts > 1 and (why := expert_obstacle(self.model, self.run.ranks.size, experts)) is not None:
            raise TrainingFailure("config_error", f"`resources.expert_parallel` is {experts}, but {why}.")
        if self.run.resume_from is not None:
            self._load_from_checkpoint(str(self.run.resume_from.path))
        quantized, text = self.run.config.load_in_4bit, self.pinned_text()
        before = fidelity_check.fidelity_value(self, text) if quantized else 0.0
        self.sharding = Sharding(self.model, self.args.device, self.run.report.alive, experts)
        if quantized and not math.isclose(fidelity_check.fidelity_value(self, text), before, rel_tol=1e-5):
            raise TrainingFailure(
                "config_error",
                "This 4-bit model computes something else once it is sharded: set `resources.sharding` to `none`.",
            )

    def gather_weights(self) -> None:
        """Gather the weights of a sharded model on rank 0, for the output."""
        if self.sharding is not None:
            self.whole_weights = self.sharding.full_weights(self.run.ranks.is_first, self.run.report.alive)

    def load_checkpoint_weights(self, folder: str, original: Callable[[], None]) -> None:
        """Load the weights of a checkpoint into the model, and check that they fit.

        Raises:
            TrainingFailure: `config_error`.
        """
        if self.sharding is not None:
            return  # `shard_model` has loaded them
        with checked_adapters(_CHECKPOINT), checked_sizes(_CHECKPOINT):
            original()
        if not isinstance(self.model, PeftModel):
            load_experts(self.model, folder)

    def check_loaded_keys(self, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Check the keys of the weights that were loaded."""
        # The files of a model with experts have other keys, which `load_experts` checks.
        if not any(expert_modules(self.model)):
            check_keys(self.model, missing, unexpected, _CHECKPOINT)

    def load_trained_weights(self, weights: TrainedWeights) -> None:
        """Load weights to use, and the position at which they were saved."""
        self.run.report.send(
            {"type": "progress", "phase": "loading", "done": 1, "total": 2, "message": "weights to use"}
        )
        self._load_from_checkpoint(str(weights.path))
        self.state.global_step, self.state.epoch = weights.step, weights.epoch
