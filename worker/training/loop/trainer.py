"""Service features for every TRL trainer: exact losses, early stops and atomic checkpoints."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftModel
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from anneal.contracts.attempt.job import TrainedWeights
from anneal.contracts.stop import StopMode
from anneal.contracts.training_config.resolution import Replacement
from worker.training.checkpointing import fidelity_check, rng_state, saver
from worker.training.context import TrainingContext
from worker.training.data.dataset import BORDERS, RowIdCollator
from worker.training.data.preferences import answer_columns
from worker.training.data.rank_share import RankShareCollator
from worker.training.failures import TrainingFailure, one_line
from worker.training.loop import loss_check
from worker.training.loop.actions import Actions
from worker.training.loop.anomalies import REMEMBERED, Anomaly, AnomalyGuard
from worker.training.loop.batch_prefetch import BatchPrefetch
from worker.training.loop.evaluation import EvaluationMixin
from worker.training.measurement import throughput
from worker.training.measurement.memory import GpuMemory
from worker.training.measurement.step_phases import StepPhases
from worker.training.measurement.throughput import Throughput
from worker.training.model.adapter_init import save_first_values
from worker.training.model.attention import known_texts
from worker.training.model.checked_weights import check_keys, checked_adapters, checked_sizes
from worker.training.model.experts import expert_modules, load_experts
from worker.training.model.parallel.expert_parallel import division_obstacle as expert_obstacle
from worker.training.model.parallel.router_loss import RouterLoss
from worker.training.model.parallel.sharding import Sharding, gather_full, has_parts, load_optimizer
from worker.training.plugins import hooks, metric_functions
from worker.training.plugins.callbacks import PluginCallbacks
from worker.training.run_state import RunState

_CHECKPOINT = "The checkpoint"
"""Subject of messages about its weights."""


class EndedBeforeStep(Exception):
    """Training ends at the step it resumed from, because of the evaluation that was still due there."""


class ServiceTrainerMixin(EvaluationMixin):
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

    sharding: Sharding | None = None
    """Division of the model among the ranks, once it is divided."""
    optimizer: Any
    lr_scheduler: Any
    _train_batch_size: int

    def __init__(self, run: TrainingContext, **options: Any) -> None:
        self.run = run
        self.step_rows: list[int] = []
        """Row numbers in the current optimizer step."""
        self.saved_step = -1
        self.saving = saver.CheckpointSaver(run)
        self.facts: dict[str, Any] = {}
        """Initial run info, reported with the configuration."""
        self.kernels: dict[str, str] = {}
        """What computes the parts of the model that have several implementations."""
        self.replaced: list[Replacement] = []
        self.throughput = Throughput()
        self.batch_prefetch = BatchPrefetch()
        self.gpu_memory = GpuMemory()
        self.step_phases = StepPhases(
            is_enabled=run.config.trainer_options.wall_clock_breakdown and run.ranks.is_first,  # which reports them
            on_gpu=run.machine.kind == "cuda",
        )
        self.guard = AnomalyGuard(run.config, run.job.auto_repairs)
        self.recomputed_part = 0.0
        """Part of the layers whose activations the backward pass recomputes."""
        self.skips_step = False
        """True if an earlier attempt found the current step to be bad: it then changes nothing."""
        self.rng_states: list[dict[str, Any]] = []
        """States of the random number generators of all ranks, for the checkpoint that is being saved."""
        self.whole_weights: dict[str, torch.Tensor] | None = None
        """Last weights of a sharded model, gathered for the output."""
        self.first_values: dict[str, torch.Tensor] = {}
        """First values of an adapter that changed the base weights, for checkpoints and the output."""
        self._micro_losses: list[torch.Tensor] = []
        self._step_loss = 0.0
        self._share = 1.0
        """Rows of the current micro-batch as a multiple of the mean over the devices of the run."""
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

    # Steps

    def set_initial_training_values(self, *args: Any) -> Any:
        # Only the number of steps ends training, and an action may raise it during training.
        return (sys.maxsize, *super().set_initial_training_values(*args)[1:])

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        with self.throughput.count_waiting():
            source = self.batch_prefetch.batches(epoch_iterator, num_batches)
            batches, items = super().get_batch_samples(source, num_batches, device)
        rows = (row for batch in batches for row in self.rows_of(batch))
        self.skips_step = self.guard.skips_step(self.state.global_step + 1, rows)
        if self.guard.may_skip:
            self.skips_step = any(self.run.ranks.gather_values(self.skips_step))
        return batches, items

    def get_train_dataloader(self) -> Any:
        ranks = self.run.ranks
        if ranks.size == 1:
            return super().get_train_dataloader()
        # The batches are those of one process with the rows of all ranks; accelerate would give each rank batches of
        # its own, and fill the last ones with rows from the beginning of the epoch.
        collate, batch_size = self.data_collator, self._train_batch_size
        self.data_collator = RankShareCollator(collate, ranks.data_parallel_rank, ranks.data_parallel_size)
        self._train_batch_size = batch_size * ranks.data_parallel_size
        try:
            with ranks.alone():
                loader = super().get_train_dataloader()
        finally:
            self.data_collator, self._train_batch_size = collate, batch_size
        loader._drop_last = True  # else accelerate would cut what it gathers in the last batch
        return loader

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if model.training:
            # Tokens are counted on all ranks, whose batches have about as many pairs.
            self.throughput.record_forward(self.token_pairs(inputs) * self.run.ranks.data_parallel_size)
            self.step_phases.enter_phase("forward")
        is_uneven = model.training and self._share != 1
        filler = _count_tokens(inputs) if is_uneven and self._share == 0 else 0
        borders = inputs.pop(BORDERS) if BORDERS in inputs else None
        texts = nullcontext() if borders is None else known_texts(borders, inputs["cu_seq_lens_q"])
        with texts, self._gathering_any_size() if is_uneven else nullcontext():
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if is_uneven:  # the row of a rank that has none is not trained on
            self._total_train_tokens -= sum(self.run.ranks.gather_values(filler))
        if is_uneven and num_items_in_batch is None:
            # The loss is the mean of the rows here, and gradients are the means of those of all ranks.
            loss = loss * self._share
        if model.training:
            self.step_phases.enter_phase("backward")
        return loss

    def token_pairs(self, inputs: Any) -> Any:
        """Return the pairs of tokens of the sequences in a batch, as `throughput.token_pairs` does."""
        return throughput.token_pairs(inputs)

    @contextmanager
    def _gathering_any_size(self) -> Iterator[None]:
        """During the block, gather tensors with a value per row, of which each rank has another number."""

        def gather_parts(tensor: torch.Tensor) -> torch.Tensor:
            parts = self.run.ranks.gather_values(tensor.detach().cpu())
            return torch.cat([part.reshape(-1, *part.shape[1:]) for part in parts]).to(tensor.device)

        self.accelerator.gather = gather_parts
        try:
            yield
        finally:
            del self.accelerator.gather

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # nothing reads the sum, and transformers would count all parameters in every micro-batch

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.step_rows += self.take_rows(inputs)
        # A batch of `rlhf` is a list of rows, all of which are this device's own.
        self._share = inputs.pop("share") if "share" in inputs else 1.0
        if self.skips_step:
            self.skip_step()
            loss = torch.zeros((), device=self.args.device)
        else:
            with self.routing(counts=self._share > 0):
                loss = super().training_step(model, inputs, num_items_in_batch)
            self.step_phases.enter_phase(None)
        self._micro_losses.append(loss.detach())
        if self.accelerator.sync_gradients and self.state.global_step + 1 < self.state.max_steps:
            with self.throughput.waiting_within_step(self.args.device):
                self.batch_prefetch.read_next_step()
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # The last point before the optimizer: a step that would corrupt the weights is never taken.
        if self.skips_step:
            self._micro_losses.clear()
            self.step_rows = [row for rows in self.run.ranks.gather_values(self.step_rows) for row in rows]
            self._disable_next_optimizer_step()
            return None
        norm = gather_full(super()._get_grad_norm(model, grad_norm=grad_norm))
        self._close_step(norm)
        return norm

    def take_step(self) -> tuple[float, list[int]]:
        """Return the exact loss and the row numbers of the step just done, of all ranks; call once per step."""
        rows, self.step_rows = self.step_rows, []
        return self._step_loss, rows

    def _close_step(self, norm: Any) -> None:
        own = float(torch.stack(self._micro_losses).sum().item())
        self._micro_losses.clear()
        # The loss of a rank is scaled so that the mean over the ranks is that of all rows.
        every = self.run.ranks.gather_values((own, self.step_rows))
        self._step_loss = math.fsum(loss for loss, _ in every) / len(every)
        self.step_rows = [row for _, rows in every for row in rows]
        known = None if norm is None else float(norm)
        recent = self.run.state.recent_losses
        # With float16, the gradient scaler finds its scale by trial: gradients may overflow, and it skips the step.
        trouble = self.guard.judge_step(self._step_loss, None if self.args.fp16 else known, recent)
        if trouble is not None:
            raise self.anomaly_failure(trouble)
        if known is None or math.isfinite(known):
            recent.append(self._step_loss)
            del recent[:-REMEMBERED]

    def anomaly_failure(self, anomaly: Anomaly) -> TrainingFailure:
        """Build the failure that ends the attempt, after an anomaly that every rank has found; only rank 0 returns."""
        if not self.run.ranks.is_first:
            if self.run.is_sharded:
                self.guard.build_failure(self, anomaly)  # rank 0 looks for the rows with the parts of the model of all
            self.run.ranks.wait_for_end()
        return self.guard.build_failure(self, anomaly)

    def _clip_grad_norm(self, model: Any) -> Any:
        return None if self.skips_step else super()._clip_grad_norm(model)

    def _disable_next_optimizer_step(self) -> None:
        """Make the optimizer's next step a no-op: no decay, no momentum, no scale."""
        optimizer = self.optimizer
        optimizer.step = lambda *_, **__: delattr(optimizer, "step")

    def skip_step(self) -> None:
        """Handle a skipped micro-batch; trainers that count micro-batches override this to count it too."""

    def rows_of(self, batch: Any) -> Sequence[int]:
        """Return the row numbers of a batch, without removing them."""
        rows: Sequence[int] = batch.get("rows", ())
        return rows

    def sequences_of(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the training sequences that contain any of these rows, each to be put through the model alone."""
        numbers = set(rows)
        places = [place for place, held in enumerate(self.train_dataset["rows"]) if not numbers.isdisjoint(held)]
        return [self.train_dataset[place] for place in places]

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
        super().log(logs, start_time)
        # The state is written into every checkpoint, and the history is kept elsewhere.
        self.state.log_history.clear()

    def trained_tokens(self) -> int:
        """Return the number of tokens trained on so far, without padding."""
        return int(self._total_train_tokens)

    def report_samples(self) -> None:
        """Report texts generated since the last metric; only trainers that generate texts override this."""

    def save_metric_averages(self) -> None:
        """Copy the trainer's own running metrics into the state that a checkpoint contains."""
        self.run.state.averages = {name: list(values) for name, values in self._metrics["train"].items()}
        self.run.state.tokens = self.trained_tokens()
        self.run.state.bad_rows = self.guard.bad_rows
        self.run.state.callbacks = self.plugin_callbacks.collect_states()

    # Sharding

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

    def _defer_fsdp_gradient_reduction(self) -> Any:
        return nullcontext()  # each micro-batch is reduced, so that no device holds the gradients of all weights

    def gather_weights(self) -> None:
        """Gather the weights of a sharded model on rank 0, for the output."""
        if self.sharding is not None:
            self.whole_weights = self.sharding.full_weights(self.run.ranks.is_first, self.run.report.alive)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.sharding is not None:
            return  # `shard` has loaded it
        with checked_adapters(_CHECKPOINT), checked_sizes(_CHECKPOINT):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not isinstance(self.model, PeftModel):
            load_experts(self.model, resume_from_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # The files of a model with experts have other keys, which `load_experts` checks.
        if not any(expert_modules(self.model)):
            check_keys(self.model, load_result.missing_keys, load_result.unexpected_keys, _CHECKPOINT)

    # Checkpoints

    def save_constant_files(self, folder: Path) -> None:
        """Write the files that every checkpoint of this process repeats: the tokenizer, and those of the method."""
        self.processing_class.save_pretrained(str(folder))
        save_first_values(self.first_values, folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.run.is_probe:
            return
        if self.run.config.trainer_options.callbacks:
            self._check_replicas()
        self.rng_states = self.run.ranks.gather_values(rng_state.current_states())
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

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        rates = hooks.initial_rates(self)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if checkpoint is not None and (self.sharding is not None or has_parts(Path(checkpoint))):
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
            load_optimizer(self.model, optimizer, Path(checkpoint))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            saver.restore_paging(optimizer)
            if hooks.controls_learning_rate(self.run.config):
                hooks.reapply_rates(self, decays, rates)
            else:
                saver.reapply_rates(self, decays)
            self._report_loaded(Path(checkpoint))

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        place = super()._init_training_state(max_steps, *args)
        # The checkpoint contains its own intervals; those of this run's configuration take precedence.
        self.state.compute_steps(self.args, max_steps)
        return place

    def _save_rng_state(self, output_dir: str) -> None:
        if self.run.ranks.size == 1:
            super()._save_rng_state(output_dir)
            return
        for rank, state in enumerate(self.rng_states):
            torch.save(state, Path(output_dir) / rng_state.file_name(rank))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        ranks = self.run.ranks
        if checkpoint is None or (ranks.size == 1 and rng_state.saved_ranks(Path(checkpoint)) == 1):
            super()._load_rng_state(checkpoint)
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
            self._save_checkpoint(self.model, None)
            self.control.should_save = False
        if self.control.should_training_stop:
            raise EndedBeforeStep

    def _report_loaded(self, checkpoint: Path) -> None:
        self.facts |= fidelity_check.compare_fidelity(self, checkpoint)
        self.report_run_info()

    def load_weights(self, weights: TrainedWeights) -> None:
        """Load weights to evaluate, and the position at which they were saved."""
        self.run.report.send(
            {"type": "progress", "phase": "loading", "done": 1, "total": 2, "message": "weights to evaluate"}
        )
        self._load_from_checkpoint(str(weights.path))
        self.state.global_step, self.state.epoch = weights.step, weights.epoch

    def restore_finished(self, folder: Path) -> None:
        """Restore weights and position from a checkpoint after which no step is left."""
        self._load_from_checkpoint(str(folder))
        self._report_loaded(folder)
        self.state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))


def _count_tokens(inputs: Any) -> int:
    """Return the number of tokens in a batch as trl counts them."""
    mask = inputs.get("attention_mask")
    return int(inputs["position_ids"].shape[1] if mask is None else mask.sum())
