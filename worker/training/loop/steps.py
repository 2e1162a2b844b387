"""Optimizer steps of a trainer: their batches, exact losses and row numbers, and what is done about anomalies."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import Trainer

from worker.training.context import TrainingContext
from worker.training.data.dataset import BORDERS
from worker.training.data.rank_share import RankShareCollator
from worker.training.failures import TrainingFailure
from worker.training.loop.anomalies import REMEMBERED, Anomaly, AnomalyGuard
from worker.training.loop.batch_prefetch import BatchPrefetch
from worker.training.measurement import throughput
from worker.training.measurement.step_phases import StepPhases
from worker.training.measurement.throughput import Throughput
from worker.training.model.attention import known_texts
from worker.training.model.parallel.sharding import gather_full


class StepMixin(Trainer):  # type: ignore[misc]
    """Part of `ServiceTrainerMixin` that does a step.

    Batches and their order are those of the trainer. On several devices, each takes its part of the rows of a batch.
    """

    run: TrainingContext
    data_collator: Any
    optimizer: Any
    _train_batch_size: int

    def __init__(self, **options: Any) -> None:
        run = self.run
        self.step_rows: list[int] = []
        """Row numbers in the current optimizer step."""
        self.throughput = Throughput()
        self.batch_prefetch = BatchPrefetch()
        self.step_phases = StepPhases(
            is_enabled=run.config.trainer_options.wall_clock_breakdown and run.ranks.is_first,  # which reports them
            on_gpu=run.machine.kind == "cuda",
        )
        self.guard = AnomalyGuard(run.config, run.job.auto_repairs)
        self.skips_step = False
        """True if an earlier attempt found the current step to be bad: it then changes nothing."""
        self.row_share = 1.0
        """Rows of the current micro-batch as a multiple of the mean over the devices of the run."""
        self._micro_losses: list[torch.Tensor] = []
        self._step_loss = 0.0
        super().__init__(**options)

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
        is_uneven = model.training and self.row_share != 1
        filler = _count_tokens(inputs) if is_uneven and self.row_share == 0 else 0
        borders = inputs.pop(BORDERS) if BORDERS in inputs else None
        texts = nullcontext() if borders is None else known_texts(borders, inputs["cu_seq_lens_q"])
        with texts, self._gathering_any_size() if is_uneven else nullcontext():
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if is_uneven:  # the row of a rank that has none is not trained on
            self._total_train_tokens -= sum(self.run.ranks.gather_values(filler))
        if is_uneven and num_items_in_batch is None:
            # The loss is the mean of the rows here, and gradients are the means of those of all ranks.
            loss = loss * self.row_share
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
        self.row_share = inputs.pop("share") if "share" in inputs else 1.0
        if self.skips_step:
            self.skip_step()
            loss = torch.zeros((), device=self.args.device)
        else:
            with self.routing(counts=self.row_share > 0):
                loss = super().training_step(model, inputs, num_items_in_batch)
            self.step_phases.enter_phase(None)
        self._micro_losses.append(loss.detach())
        if self.accelerator.sync_gradients and self.state.global_step + 1 < self.state.max_steps:
            with self.throughput.waiting_within_step(self.args.device):
                self.batch_prefetch.read_next_step()
        return loss

    def take_step(self) -> tuple[float, list[int]]:
        """Return the exact loss and the row numbers of the step just done, of all ranks; call once per step."""
        rows, self.step_rows = self.step_rows, []
        return self._step_loss, rows

    def skip_optimizer_step(self) -> None:
        """Handle the end of a skipped step: the optimizer does not take it."""
        self._micro_losses.clear()
        self.step_rows = [row for rows in self.run.ranks.gather_values(self.step_rows) for row in rows]
        # No decay, no momentum, no scale.
        optimizer = self.optimizer
        optimizer.step = lambda *_, **__: delattr(optimizer, "step")

    def close_step(self, norm: Any) -> Any:
        """Judge the step that the optimizer is about to take, and return the norm of its gradients over all ranks.

        Raises:
            TrainingFailure: the step is anomalous.
        """
        norm = gather_full(norm)
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
        return norm

    def anomaly_failure(self, anomaly: Anomaly) -> TrainingFailure:
        """Build the failure that ends the attempt, after an anomaly that every rank has found; only rank 0 returns."""
        if not self.run.ranks.is_first:
            if self.run.is_sharded:
                self.guard.build_failure(self, anomaly)  # rank 0 looks for the rows with the parts of the model of all
            self.run.ranks.wait_for_end()
        return self.guard.build_failure(self, anomaly)

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


def _count_tokens(inputs: Any) -> int:
    """Return the number of tokens in a batch as trl counts them."""
    mask = inputs.get("attention_mask")
    return int(inputs["position_ids"].shape[1] if mask is None else mask.sum())
