"""Next tokens of the rows of a batch, each by its own question's options and random numbers."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from anneal.contracts.attempt.answers import Question
from worker.training.prediction.generation import draw_tokens

_LOWEST_TEMPERATURE = 1e-5
"""Below it, the most probable token has all of the probability, and scores may overflow."""


@dataclass(frozen=True)
class Sampler:
    """Options of one choice of a question, and its random numbers, which no other choice uses."""

    temperature: float
    top_p: float
    random: random.Random

    @classmethod
    def of_choice(cls, question: Question, choice: int) -> "Sampler":
        """Return the sampler of a choice; without a seed, its numbers are different each time."""
        seed = None if question.seed is None else f"{question.seed} {choice}"
        return cls(question.temperature, question.top_p, random.Random(seed))

    @property
    def is_greedy(self) -> bool:
        """True if it takes the most probable token."""
        return self.temperature < _LOWEST_TEMPERATURE


def choose_tokens(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int | None]:
    """Return the next token of each row; None for a row with logits that are NaN or infinite.

    Args:
        logits: shape (rows, tokens of the vocabulary), float32.
        samplers: that of each row.
    """
    highest, best = logits.max(dim=-1)
    rows_by_options: dict[tuple[float, float], list[int]] = {}
    for row, sampler in enumerate(samplers):
        if not sampler.is_greedy:
            rows_by_options.setdefault((sampler.temperature, sampler.top_p), []).append(row)
    for (temperature, top_p), rows in rows_by_options.items():
        scores = _warpers(temperature, top_p)(None, logits if len(rows) == len(samplers) else logits[rows])
        best[rows] = draw_tokens(scores, [samplers[row].random.random() for row in rows]).squeeze(1)
    return [
        token if math.isfinite(value) else None for token, value in zip(best.tolist(), highest.tolist(), strict=True)
    ]


def _warpers(temperature: float, top_p: float) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(float(top_p)))
    return warpers
