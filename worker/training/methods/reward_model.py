"""Reward models (`reward`): pairs of a better and a worse answer, and a model with a scalar head."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trl import RewardConfig, RewardTrainer

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.data import preferences
from worker.training.data.preferences import Pairs
from worker.training.data.reader import RowSource
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.methods import pipeline, preparation


class RewardModelTrainer(ServiceTrainerMixin, RewardTrainer):  # type: ignore[misc]
    """A trainer on tokenized pairs; `RewardTrainer.compute_loss` of TRL computes the loss."""

    MEASURES: ClassVar[Mapping[str, str]] = {
        "accuracy": "preference_accuracy",
        "margin": "reward_margin",
        "mean_reward": "reward_mean",
        "min_reward": "reward_min",
        "max_reward": "reward_max",
    }

    def update_own_metrics(self, model: Any, inputs: Any) -> None:
        batch = self._prepare_inputs(inputs)
        tokens = {name: batch[name] for name in ("input_ids", "attention_mask")}
        scores = model(**tokens, use_cache=False).logits.squeeze(-1)
        self.own_metrics.update_scores(*scores.chunk(2))

    def usual_length(self, tokens_of_a_row: float) -> float:
        return tokens_of_a_row / 2


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run on preference pairs; result and errors are those of `pipeline.train_on_tokens`."""
    setup = preparation.prepare_start(run, replaced)
    no_dropout = preparation.must_disable_dropout(run, replaced)
    preparation.chat_template_if_needed(run, setup.tokenizer)

    def tokenize_rows(rows: RowSource) -> Pairs:
        return preferences.read_comparisons(rows, setup.tokenizer, max_length=setup.max_length)

    def arguments(shared: dict[str, Any]) -> RewardConfig:
        # Pairs that are too long have been left out.
        multiple = preparation.padding_multiple(run, setup)
        return RewardConfig(**shared, max_length=None, pad_to_multiple_of=multiple, disable_dropout=no_dropout)

    return pipeline.train_on_tokens(run, replaced, setup, tokenize_rows, RewardModelTrainer, arguments)
