"""Training on preference pairs with TRL's `DPOTrainer`: the rows, options and metrics that all of its losses share."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from trl import DPOConfig
from trl.trainer import dpo_trainer

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import preferences
from worker.training.data.preferences import Pairs
from worker.training.data.reader import RowSource
from worker.training.methods import pipeline, preparation
from worker.training.overrides import avoid_weight_hash

avoid_weight_hash(dpo_trainer)


class PairMixin:
    """Mixin for trainers on tokenized pairs, before that of the service."""

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


def train_on_pairs(
    run: TrainingContext, replaced: list[Replacement], make: type[Any], loss_options: Callable[[], Mapping[str, Any]]
) -> TrainingResult:
    """Train one run on preference pairs; result and errors are those of `pipeline.train_on_tokens`.

    `make` creates the trainer, and `loss_options` returns the options of its loss once the rows are read.
    """
    setup = preparation.prepare_start(run, replaced)
    no_dropout = preparation.must_disable_dropout(run, replaced)
    preparation.chat_template_if_needed(run, setup.tokenizer)
    max_length, truncation_mode = setup.max_length, run.config.truncation_mode

    def tokenize_rows(rows: RowSource) -> Pairs:
        return preferences.read_preferences(
            rows, setup.tokenizer, max_length=max_length, truncation_mode=truncation_mode
        )

    def arguments(shared: dict[str, Any]) -> DPOConfig:
        return DPOConfig(
            **shared,
            **loss_options(),
            max_length=max_length,
            pad_to_multiple_of=preparation.padding_multiple(run, setup),
            truncation_mode=truncation_mode,
            disable_dropout=no_dropout,
        )

    return pipeline.train_on_tokens(run, replaced, setup, tokenize_rows, make, arguments)
