"""Service features for every TRL trainer: exact losses, early stops and atomic checkpoints."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from anneal.contracts.stop import StopMode
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data.dataset import RowIdCollator
from worker.training.data.preferences import answer_columns
from worker.training.failures import TrainingFailure, one_line
from worker.training.loop.actions import Actions
from worker.training.loop.checkpoints import CheckpointMixin
from worker.training.loop.evaluation import EvaluationMixin
from worker.training.loop.steps import StepMixin
from worker.training.loop.weights import WeightsMixin
from worker.training.measurement.memory import GpuMemory
from worker.training.model.parallel.router_loss import RouterLoss
from worker.training.overrides import TrainerOverrides
from worker.training.plugins import hooks, metric_functions
from worker.training.plugins.callbacks import PluginCallbacks


class ServiceTrainerMixin(StepMixin, CheckpointMixin, WeightsMixin, EvaluationMixin, TrainerOverrides):
    """Mixin that adds exact step losses, early stop and atomic checkpoints to a TRL trainer.

    It precedes the trainer, as in `class SupervisedTrainer(ServiceTrainerMixin, SFTTrainer)`, and does not change its
    loss, data order or updates.
    Rows carry their numbers in the dataset in a column `rows`.
    """

    MEASURES: ClassVar[Mapping[str, str]] = {}
    """Metrics of the trainer: its own names, and the names used here. Each is part of metrics (unchanged) and of
    evaluations (with the prefix `eval_`)."""
    NOT_COUNTED: ClassVar[str | None] = None
    """Work of the method that is part of the step time, but not of the operations that MFU is computed from."""

    def __init__(self, run: TrainingContext, **options: Any) -> None:
        self.run = run
        self.facts: dict[str, Any] = {}
        """Initial run info, reported with the configuration."""
        self.kernels: dict[str, str] = {}
        """Implementations of the parts of the model that have several."""
        self.replaced: list[Replacement] = []
        self.gpu_memory = GpuMemory()
        self.recomputed_part = 0.0
        """Part of the layers whose activations the backward pass recomputes."""
        self.actions = Actions(self)
        self.plugin_callbacks = PluginCallbacks(self)
        super().__init__(**options)
        if run.ranks.size > 1 and getattr(self, "aux_loss_enabled", False):  # TRL adds it for models that have one
            self.router_loss = RouterLoss(self.model)
            run.routes_together = not run.method.generates and not (
                run.metric_factories and metric_functions.are_given_logits(run.method)
            )
        collate = hooks.build_collator(run, self.data_collator, self.processing_class)
        self.data_collator: Any = self.collate_with_rows(collate)

    def collate_with_rows(self, collate: Any) -> Any:
        """Return a collator that keeps the row numbers of each batch, for `take_rows`."""
        return RowIdCollator(collate)

    def take_rows(self, inputs: Any) -> list[int]:
        """Remove the row numbers from a batch and return them."""
        rows: list[int] = inputs.pop("rows", [])
        return rows

    def metric_names(self) -> Mapping[str, str]:
        """Return `MEASURES`, plus the metrics of this run only."""
        return self.MEASURES

    def pinned_text(self) -> list[int]:
        """Return the token ids of the text used by the fidelity check, before a save and after a load."""
        first = self.train_dataset[0]
        column = [*answer_columns(first), "input_ids"][0]
        return [*first.get("prompt_ids", ()), *first[column]]

    def report_run_info(self) -> None:
        """Report the configuration in effect, the defaults that were replaced and the initial run info."""
        self.run.report_config(self.replaced, self.facts)
        self.run.trackers.describe(self.run.config.model_dump(mode="json"), self.facts)

    def has_reference_pass(self) -> bool:
        """Return True if each step has a forward pass of a reference model."""
        return False

    def usual_length(self, tokens_of_a_row: float) -> float:
        """Return the mean tokens per sequence that the model sees, given those per dataset row."""
        return tokens_of_a_row

    # Hooks for plugins

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.sharding is not None:
            # After a check of the model, those of the embeddings are whole copies, which training does not use.
            self.sharding.reshard()
        installed = hooks.create_optimizer(self, self.model if model is None else model)
        self.optimizer = self.optimizer if installed is None else installed
        try:
            return super().create_optimizer(model)
        except (ValueError, TypeError, NotImplementedError) as error:
            message = (
                f"The optimizer `{self.run.config.optim}` cannot be used with this configuration: {one_line(error)}"
            )
            raise TrainingFailure("config_error", message) from error

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        installed = hooks.create_scheduler(self, num_training_steps, self.optimizer if optimizer is None else optimizer)
        self.lr_scheduler = self.lr_scheduler if installed is None else installed
        return super().create_scheduler(num_training_steps, optimizer)

    # Ends and logs

    def end_early(self, why: str, mode: StopMode) -> None:
        """End training after the current step, with what the stop mode saves: `checkpoint`, `best` or `discard`."""
        run, control = self.run, self.control
        run.ended_by = run.state.ended_by = why
        run.save_kind = "stop"
        control.should_training_stop = True
        control.should_save = mode == "checkpoint"
        if mode == "discard":
            self.saving.in_flight.abandon()
        if control.should_evaluate:
            # The evaluation that is due is left to the resumed run, which does it first.
            control.should_evaluate = False
            run.state.eval_pending = True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        losses = self.run.state.losses
        if "loss" in logs and losses:
            # The mean of exact losses, not the trainer's running sum, which restarts after a resume.
            logs = {**logs, "loss": sum(losses) / len(losses)}
        super().log(logs, start_time)
        # The state is written into every checkpoint, and the history is kept elsewhere.
        self.state.log_history.clear()

    def trained_tokens(self) -> int:
        """Return the number of tokens trained on so far, without padding."""
        return int(self._total_train_tokens)

    def report_samples(self) -> None:
        """Report texts generated since the last metric; only trainers that generate texts override this."""
