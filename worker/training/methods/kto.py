"""Kahneman-Tversky optimization (`kto`): answers rated as desirable or not, and a frozen reference model."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trl import KTOConfig, KTOTrainer
from trl.trainer import kto_trainer

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data.preferences import Pairs
from worker.training.data.rated_answers import rated_answers
from worker.training.data.reader import RowSource
from worker.training.methods import pipeline, preparation, reference
from worker.training.methods.reference import ReferenceMixin
from worker.training.overrides import RatedAnswerOverrides, avoid_weight_hash

avoid_weight_hash(kto_trainer)


class RatedAnswerTrainer(RatedAnswerOverrides, ReferenceMixin, KTOTrainer):  # type: ignore[misc]
    """A trainer on tokenized rows; `KTOTrainer.compute_loss` of TRL computes the loss."""

    MEASURES: ClassVar[Mapping[str, str]] = {
        "kl": "kl",
        "rewards/margins": "reward_margin",
        "rewards/chosen": "reward_desirable",
        "rewards/rejected": "reward_undesirable",
        "logps/chosen": "logps_desirable",
        "logps/rejected": "logps_undesirable",
        "entropy": "entropy",
    }
    NOT_COUNTED = "forward passes that estimate the KL term"

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if "ref_KL_logps" in inputs:
            inputs["ref_KL_logps"] = inputs["ref_KL_logps"] * inputs.get("share", 1.0)
        return super().training_step(model, inputs, num_items_in_batch)


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run on rated answers; result and errors are those of `pipeline.train_on_tokens`."""
    setup = preparation.prepare_start(run, replaced)
    no_dropout = preparation.must_disable_dropout(run, replaced)
    preparation.chat_template_if_needed(run, setup.tokenizer)
    max_length, config = setup.max_length, run.config
    # The answers for the KL term are those of one device with the micro-batches of all.
    batch_size = config.batch_size * run.ranks.data_parallel_size

    def tokenize_rows(rows: RowSource) -> Pairs:
        return rated_answers(rows, setup.tokenizer, max_length=max_length, batch_size=batch_size)

    def arguments(shared: dict[str, Any]) -> KTOConfig:
        return KTOConfig(
            **shared,
            beta=config.kto.beta,
            loss_type=config.kto.loss_type,
            desirable_weight=config.kto.desirable_weight,
            undesirable_weight=config.kto.undesirable_weight,
            max_length=max_length,
            pad_to_multiple_of=preparation.padding_multiple(run, setup),
            disable_dropout=no_dropout,
            precompute_ref_log_probs=reference.is_precomputed(run),
        )

    return pipeline.train_on_tokens(run, replaced, setup, tokenize_rows, RatedAnswerTrainer, arguments)
