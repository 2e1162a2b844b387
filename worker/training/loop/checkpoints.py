"""Checkpoints of a trainer: what is saved with the weights, and the exact restoration of all of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from worker.training.checkpointing import fidelity_check, rng_state, saver
from worker.training.context import TrainingContext
from worker.training.failures import TrainingFailure
from worker.training.model.adapter_init import save_first_values
from worker.training.model.parallel.sharding import has_parts, load_optimizer
from worker.training.plugins import hooks
from worker.training.run_state import RunState


class EndedBeforeStep(Exception):
    """Training ends at the step it resumed from, because of the evaluation that was still due there."""


class CheckpointMixin(Trainer):  # type: ignore[misc]
    """Part of `ServiceTrainerMixin` that saves checkpoints, and resumes from one."""

    run: TrainingContext
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, **options: Any) -> None:
        self.saved_step = -1
        """Optimizer step of the last checkpoint; -1 before the first."""
        self.saving = saver.CheckpointSaver(self.run)
        self._rng_states: list[dict[str, Any]] = []
        """States of the random number generators of all ranks, for the checkpoint that is being saved."""
        super().__init__(**options)

    def save_constant_files(self, folder: Path) -> None:
        """Write the files that every checkpoint of this process repeats: the tokenizer, and those of the method."""
        self.processing_class.save_pretrained(str(folder))
        save_first_values(self.first_values, folder)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the current step; every rank calls this."""
        if self.run.is_probe:
            return
        if self.run.config.trainer_options.callbacks:
            self._check_replicas()
        self._rng_states = self.run.ranks.gather_values(rng_state.current_states())
        if not self.run.ranks.is_first and self.sharding is None:
            self.saved_step = self.state.global_step
            return
        if saver.save_checkpoint(self) and not self.control.should_training_stop:
            self.run.report.send({"type": "phase", "name": "training"})

    def _check_replicas(self) -> None:
        """Check that every rank has the same weights, which a callback can change on rank 0 alone.

        Raises:
            TrainingFailure: `config_error`.
        """
        trained = (one.detach() for one in self.model.parameters() if one.requires_grad)
        total = sum(float(one.double().sum()) for one in trained)
        if len(set(self.run.ranks.gather_values(total))) > 1:
            raise TrainingFailure(
                "config_error",
                "The devices have different weights: a callback (`extra.callbacks`) has changed weights, gradients or "
                "the optimizer, and callbacks run in the process of the first device only. Use one device, or a "
                "callback that only reads them.",
            )

    def restore_from(self, folder: Path) -> None:
        """Restore the run's state from a checkpoint; call before `train(resume_from_checkpoint=…)`."""
        self.saved_step = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
        self.run.state = RunState.load(folder, self.run.job.run_id, self.saved_step)
        self.guard.take_over(self.run.state.bad_rows)
        for history in self.run.histories:
            history.start_from(folder)
        self.plugin_callbacks.restore_states(self.run.state.callbacks)
        self.actions.apply_changes()
        self._total_train_tokens = self.run.state.tokens
        for name, values in self.run.state.averages.items():
            self._metrics["train"][name] = list(values)

    def load_optimizer_and_scheduler(self, checkpoint: str | None, original: Callable[[], None]) -> None:
        """Load the states of optimizer and scheduler, with the learning rate and weight decay of this configuration."""
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        rates = hooks.initial_rates(self)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if checkpoint is not None and (self.sharding is not None or has_parts(Path(checkpoint))):
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
            load_optimizer(self.model, optimizer, Path(checkpoint))
        else:
            original()
        if checkpoint is not None:
            saver.restore_paging(optimizer)
            if hooks.controls_learning_rate(self.run.config):
                hooks.reapply_rates(self, decays, rates)
            else:
                saver.reapply_rates(self, decays)
            self._report_loaded(Path(checkpoint))

    def save_rng_states(self, folder: str, original: Callable[[], None]) -> None:
        """Save the states of the random number generators of all ranks."""
        if self.run.ranks.size == 1:
            original()
            return
        for rank, state in enumerate(self._rng_states):
            torch.save(state, Path(folder) / rng_state.file_name(rank))

    def load_rng_states(self, checkpoint: str | None, original: Callable[[], None]) -> None:
        """Restore the random number generators, then do the evaluation that is still due after the last step."""
        ranks = self.run.ranks
        if checkpoint is None or (ranks.size == 1 and rng_state.saved_ranks(Path(checkpoint)) == 1):
            original()
        elif not rng_state.restore_states(Path(checkpoint), ranks):
            rng_state.seed_generators((self.run.config.seed, self.state.global_step, ranks.rank))
        if self.run.state.eval_pending and self.eval_dataset is not None:
            self._catch_up()

    def _catch_up(self) -> None:
        """Evaluate where an uninterrupted run did, before the next step, and save or end as it would have."""
        self.run.state.eval_pending = False
        if not self.evaluate():
            return  # stopped: handled after the step
        if self.control.should_save:
            self.save_checkpoint()
            self.control.should_save = False
        if self.control.should_training_stop:
            raise EndedBeforeStep

    def _report_loaded(self, checkpoint: Path) -> None:
        self.facts |= fidelity_check.compare_fidelity(self, checkpoint)
        self.report_run_info()

    def restore_finished(self, folder: Path) -> None:
        """Restore weights and position from a checkpoint after which no step is left."""
        self._load_from_checkpoint(str(folder))
        self._report_loaded(folder)
        self.state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))

    def save_metric_averages(self) -> None:
        """Copy the trainer's own running metrics into the state that a checkpoint contains."""
        self.run.state.averages = {name: list(values) for name, values in self._metrics["train"].items()}
        self.run.state.tokens = self.trained_tokens()
        self.run.state.bad_rows = self.guard.bad_rows
        self.run.state.callbacks = self.plugin_callbacks.collect_states()
