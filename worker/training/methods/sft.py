"""Supervised fine-tuning (`sft`, `full`, `lora`, `qlora`) on chats, prompts with completions, or texts."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import dataset
from worker.training.data.chat_template import training_template, trains_end_of_turn
from worker.training.data.dataset import BORDERS, Tokens
from worker.training.data.reader import RowSource, has_weights
from worker.training.data.sequence_share import WHOLE, SequenceShareCollator, WholeSequences
from worker.training.loop import loss_check
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import pipeline, preparation
from worker.training.model.parallel.sequence_parallel import SequenceParallel
from worker.training.overrides import SupervisedOverrides


class SupervisedTrainer(SupervisedOverrides, ServiceTrainerMixin, SFTTrainer):  # type: ignore[misc]
    """A trainer on tokenized data; `SFTTrainer.compute_loss` of TRL computes the loss, also that of `qlora`."""

    MEASURES: ClassVar[Mapping[str, str]] = {"mean_token_accuracy": "token_accuracy", "entropy": "entropy"}

    def __init__(self, run: TrainingContext, **options: Any) -> None:
        super().__init__(run, **options)
        self.sequences = SequenceParallel(self.model, run.ranks) if run.ranks.per_sequence > 1 else None
        """Division of each sequence among ranks; None: a rank has whole sequences."""
        self._whole: WholeSequences | None = None

    def prepare_model(self) -> None:
        super().prepare_model()
        if self.sequences is not None:
            self.sequences.check_logits(self.model, self.pinned_text(), self.accelerator.autocast)
        elif self.padding_free:
            loss_check.check_separation(self)

    def get_train_dataloader(self) -> Any:
        with self._dividing_sequences():
            return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        with self._dividing_sequences():
            return super().get_eval_dataloader(eval_dataset)

    @contextmanager
    def _dividing_sequences(self) -> Iterator[None]:
        """During the block, the collator keeps this rank's part of each sequence."""
        collate, ranks = self.data_collator, self.run.ranks
        if self.sequences is not None:
            pad = self.processing_class.pad_token_id
            self.data_collator = SequenceShareCollator(collate, ranks.sequence_parallel_rank, ranks.per_sequence, pad)
        try:
            yield
        finally:
            self.data_collator = collate

    @contextmanager
    def _over_sequences_of(self, inputs: Any) -> Iterator[None]:
        """During the block, which contains the backward pass, attend over the whole sequences of a divided batch."""
        self._whole = inputs.pop(WHOLE, None)
        if self.sequences is None or self._whole is None:
            yield
            return
        self._whole = self._whole.to(self.args.device)
        with self.sequences.divide_during(self._whole):
            yield
        self._whole = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        with self._over_sequences_of(inputs):
            return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        with self._over_sequences_of(inputs):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def token_pairs(self, inputs: Any) -> Any:
        whole = self._whole
        if whole is None:
            return super().token_pairs(inputs)
        return super().token_pairs(
            {"position_ids": whole.positions} if whole.mask is None else {"attention_mask": whole.mask}
        )

    def update_own_metrics(self, model: Any, inputs: Any) -> None:
        batch = self._prepare_inputs(inputs) | {"use_cache": False}
        labels = batch.pop("labels")
        batch.pop(BORDERS, None)
        logits = model(**batch).logits
        if "cu_seq_lens_q" not in batch:
            self.own_metrics.update(logits, labels)
            return
        for first, end in pairwise(batch["cu_seq_lens_q"].tolist()):
            if end - first > 1:  # the only token of a text is not predicted
                self.own_metrics.update(logits[:, first:end], labels[:, first:end])

    def eval_terms(self, inputs: Any) -> int:
        # The first token of a sequence is never predicted.
        targets = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
        return int((targets != -100).sum())

    def named_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        reported = super().named_metrics(metrics)
        reported["eval_perplexity"] = math.exp(min(reported["eval_loss"], 700.0))
        return reported


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run on examples; result and errors are those of `pipeline.train_on_tokens`."""
    setup = preparation.prepare_start(run, replaced)
    _learn_weighted_answers(run, replaced)
    max_length, config = setup.max_length, run.config
    preparation.chat_template_if_needed(run, setup.tokenizer)
    if config.loss_on == "assistant" and "chat" in {source.format for source in run.job.datasets}:
        _report_answer_marks(run, setup.tokenizer)
    vocabulary = getattr(setup.base.architecture.get_text_config(), "vocab_size", None)

    def tokenize_rows(rows: RowSource) -> Tokens:
        return dataset.tokenize_file(
            rows.path, rows.format, setup.tokenizer, config, max_length=max_length, chosen=rows.chosen,
            purpose=rows.purpose, progress=rows.progress, sha256=rows.sha256, cache=rows.cache,
            vocabulary=vocabulary,
        )  # fmt: skip

    def arguments(shared: dict[str, Any]) -> SFTConfig:
        is_padding_free = preparation.resolve_padding(run)
        is_padded = not is_padding_free and not (config.packing and config.trainer_options.packing_strategy == "bfd")
        return SFTConfig(
            **shared,
            neftune_noise_alpha=config.neftune_noise_alpha,
            max_length=None if is_padding_free else max_length,  # the rows have been truncated to it
            padding_free=is_padding_free,
            pad_to_multiple_of=preparation.padding_multiple(run, setup) if is_padded else None,
            packing=config.packing,
            packing_strategy=config.trainer_options.packing_strategy,
            dataset_kwargs={"skip_prepare_dataset": True},
        )

    return pipeline.train_on_tokens(run, replaced, setup, tokenize_rows, SupervisedTrainer, arguments)


def _learn_weighted_answers(run: TrainingContext, replaced: list[Replacement]) -> None:
    """Learn only the answers, as OpenAI does, where messages have a `weight` and `loss_on` is not set."""
    data = run.dataset
    if "loss_on" in run.user_set_fields or data.format != "chat" or not has_weights(str(data.path)):
        return
    reason = "Messages of the training data have a `weight`, with which answers are learned and nothing else."
    preparation.replace_default(
        run, replaced, Replacement(field="loss_on", requested=run.config.loss_on, used="assistant", reason=reason)
    )


def _report_answer_marks(run: TrainingContext, tokenizer: PreTrainedTokenizerBase) -> None:
    """Report the template that locates the answers, where it is not the tokenizer's own, and what it leaves out."""
    if training_template(tokenizer) is not None:
        run.report.message(
            "The chats are rendered with TRL's training template of this model's family, which marks the answers. The "
            "output keeps the model's own template."
        )
    if not trains_end_of_turn(tokenizer):
        run.report.message(
            "The chat template leaves the token that ends an answer out of its {% generation %} marks, so the model "
            "may not learn to stop. Move it inside the marks, or use `loss_on` = `all`.",
            level="warning",
        )
