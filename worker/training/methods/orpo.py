"""Odds ratio preference optimization (`orpo`): better answers are learned, and preferred to worse ones at once."""

from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from worker.training.context import TrainingContext
from worker.training.methods.reference_free import PairScores, ReferenceFreeTrainer, train_without_reference


class OddsRatioTrainer(ReferenceFreeTrainer):
    """The loss of TRL's experimental `ORPOTrainer`: that of the better texts, and `beta` times that of the odds ratio.

    Paper: https://arxiv.org/abs/2403.07691, equations 4 to 7.
    """

    LEARNS_PROMPTS: ClassVar[bool] = True

    def pair_loss(self, scores: PairScores) -> torch.Tensor:
        log_odds = _log_odds(scores.chosen) - _log_odds(scores.rejected)
        return -self.mean_of_tokens(scores.chosen_texts) - self.beta * logsigmoid(log_odds).mean()


def _log_odds(logps: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)) of log-probabilities."""
    # A probability that rounds to 1 would have infinite odds, and gradients that are not numbers.
    logps = logps.float().clamp(max=-torch.finfo(torch.float32).eps)
    return logps - torch.log(-torch.expm1(logps))


def train(run: TrainingContext, replaced: list[Replacement]) -> TrainingResult:
    """Train one run on preference pairs; result and errors are those of `pipeline.train_on_tokens`."""
    return train_without_reference(run, replaced, OddsRatioTrainer, run.config.orpo.beta)
