"""Simple preference optimization (`simpo`): the mean log-probability of an answer is its reward."""

from typing import Any

import torch
from torch.nn.functional import logsigmoid

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.methods.reference_free import PairScores, ReferenceFreeTrainer, train_without_reference


class MarginTrainer(ReferenceFreeTrainer):
    """The loss of TRL's experimental `CPOTrainer` with `loss_type="simpo"` and `cpo_alpha=0`.

    Paper: https://arxiv.org/abs/2405.14734, equation 6.
    """

    def __init__(self, run: TrainingContext, **options: Any) -> None:
        self.gamma = run.config.simpo.gamma
        super().__init__(run, **options)

    def pair_loss(self, scores: PairScores) -> torch.Tensor:
        return -logsigmoid(self.beta * (scores.chosen - scores.rejected) - self.gamma).mean()


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run on preference pairs; result and errors are those of `pipeline.train_on_tokens`."""
    return train_without_reference(run, replaced, MarginTrainer, run.config.simpo.beta)
