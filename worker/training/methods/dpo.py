"""Direct preference optimization (`dpo`): pairs of a better and a worse answer, and a frozen reference model."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trl import DPOConfig, DPOTrainer
from trl.trainer import dpo_trainer

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import preferences
from worker.training.data.preferences import Pairs
from worker.training.data.reader import RowSource
from worker.training.methods import pipeline, preparation, reference
from worker.training.methods.reference import ReferenceMixin
from worker.training.overrides import avoid_weight_hash

avoid_weight_hash(dpo_trainer)


class PreferenceTrainer(ReferenceMixin, DPOTrainer):  # type: ignore[misc]
    """A trainer on tokenized pairs; `DPOTrainer.compute_loss` of TRL computes the loss."""

    MEASURES: ClassVar[Mapping[str, str]] = {
        "rewards/accuracies": "preference_accuracy",
        "rewards/margins": "reward_margin",
        "rewards/chosen": "reward_chosen",
        "rewards/rejected": "reward_rejected",
        "logps/chosen": "logps_chosen",
        "logps/rejected": "logps_rejected",
        "mean_token_accuracy": "token_accuracy",
        "entropy": "entropy",
    }

    def usual_length(self, tokens_of_a_row: float) -> float:
        return tokens_of_a_row / 2


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run on preference pairs; result and errors are those of `pipeline.train_on_tokens`."""
    setup = preparation.prepare_start(run, replaced)
    no_dropout = preparation.must_disable_dropout(run, replaced)
    preparation.chat_template_if_needed(run, setup.tokenizer)
    max_length, config = setup.max_length, run.config

    def read(rows: RowSource) -> Pairs:
        return preferences.read_preferences(
            rows, setup.tokenizer, max_length=max_length, truncation_mode=config.truncation_mode
        )

    def arguments(shared: dict[str, Any]) -> DPOConfig:
        return DPOConfig(
            **shared,
            beta=config.dpo.beta,
            loss_type=[config.dpo.loss_type],
            label_smoothing=config.dpo.label_smoothing,
            max_length=max_length,
            pad_to_multiple_of=preparation.padding_multiple(run, setup),
            truncation_mode=config.truncation_mode,
            disable_dropout=no_dropout,
            precompute_ref_log_probs=reference.is_precomputed(run),
        )

    return pipeline.train_on_tokens(run, replaced, setup, read, PreferenceTrainer, arguments)
