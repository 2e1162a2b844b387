"""Reward functions whose scores a service gives; a completion without a score is counted, and never counts as 0.

Does not import torch.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anneal.contracts.rewards import USAGE_METRICS, ServiceReward
from worker.training.failures import TrainingFailure
from worker.training.reward_services.service_client import (
    REWARD_UNAVAILABLE,
    CallContext,
    CallFailed,
    Post,
    ServiceClient,
)
from worker.wire.reporter import Reporter

_RECENT = 100
_MOST_MISSING = 10
_LARGEST_SCORE = 1e9
"""TRL computes with 32 bits, in which larger numbers become infinite or equal."""


@dataclass(frozen=True)
class Row:
    """Completion to score."""

    prompt: Any
    """Text or messages."""
    completion: str
    reference: str | None
    """None: the row of the dataset has no answer to compare with."""
    item: str = "{}"
    """Columns of the row that templates refer to, as JSON."""


class ServiceScorer(ABC):
    """Reward function of a service, called as TRL calls one; `__name__` is its name in metrics."""

    def __init__(
        self, reward: ServiceReward, name: str, context: CallContext, *, url: str, rows_per_call: int = 1
    ) -> None:
        """Prepare calls to `url`.

        Raises:
            TrainingFailure: `config_error`: the operator does not allow the URL, or its key is missing.
        """
        self.__name__ = name
        self.client = ServiceClient(reward, name, url, context)
        self._context, self._rows_per_call = context, rows_per_call
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        """For each of the last completions, True if its score is missing."""
        self._reason = ""
        """Reason for the last missing score."""
        self._missing, self._warn_at = 0, 1

    @abstractmethod
    async def score_rows(self, post: Post, rows: Sequence[Row]) -> list[float | None]:
        """Return the score of each row.

        Raises:
            CallFailed: None of them has a score.
        """

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        answer: Sequence[str | None] | None = None,
        item: Sequence[str] | None = None,
        **_columns: Any,
    ) -> list[float | None]:
        """Return one score per completion (a text or a list of messages), in order; None: it is missing.

        Raises:
            TrainingFailure: `reward_unavailable`: too many scores are missing, or no call can succeed.
        """
        references = answer if answer is not None else [None] * len(completions)
        items = item if item is not None else ["{}"] * len(completions)
        rows = [
            Row(prompt, text if isinstance(text, str) else text[-1]["content"] or "", reference, of_row)
            for prompt, text, reference, of_row in zip(prompts, completions, references, items, strict=True)
        ]
        size = self._rows_per_call
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        scores = [score for part in self.client.map_calls(self._score_or_note, parts) for score in part]
        self._count_missing(scores)
        return scores

    async def _score_or_note(self, post: Post, rows: Sequence[Row]) -> list[float | None]:
        try:
            scores = await self.score_rows(post, rows)
        except CallFailed as failure:
            self._reason = str(failure)
            return [None] * len(rows)
        if None in scores:
            self._reason = "the service gives it none"
        return scores

    def _count_missing(self, scores: Sequence[float | None]) -> None:
        """Count the missing scores; warn of the first one, and each time that their number has doubled.

        Raises:
            TrainingFailure: `reward_unavailable`: too many of the last ones are missing.
        """
        usage, are_missing = self.client.usage, [score is None for score in scores]
        usage["reward_missing"] += sum(are_missing)
        self._missing += sum(are_missing)
        self._recent.extend(are_missing)
        missing = sum(self._recent)
        # Calls are not repeated before a stop, so that there may be many.
        if missing > max(_MOST_MISSING, len(self._recent) / 5) and not self._context.is_stopping():
            raise TrainingFailure(
                REWARD_UNAVAILABLE,
                f"Reward `{self.__name__}` is missing for {missing} of the last {len(self._recent)} completions: "
                f"{self._reason}. Correct the reward or its service. A run that has checkpoints can be resumed.",
            )
        if self._missing >= self._warn_at:
            self._warn_at = 2 * self._missing
            self._context.warn(
                f"Reward `{self.__name__}` is missing for {self._missing:,} of the completions so far, which are left "
                f"out: {self._reason}."
            )

    def take_usage(self) -> dict[str, int]:
        """Return what the calls since the last time have cost, by the names of `USAGE_METRICS`."""
        usage, self.client.usage = self.client.usage, dict.fromkeys(USAGE_METRICS, 0)
        return usage


def read_score(value: Any) -> float | None:
    """Return the score that a service gives as a JSON value; None: it is not a number, or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_SCORE:
        return None
    return float(value)


def take_usage(functions: Iterable[Any]) -> dict[str, int]:
    """Return what the calls of these reward functions since the last time have cost; empty if none of them calls."""
    usage: dict[str, int] = {}
    for function in functions:
        if isinstance(function, ServiceScorer):
            usage = add_usage(usage, function.take_usage())
    return usage


def add_usage(total: Mapping[str, int], usage: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of two results of `take_usage`."""
    return {name: total.get(name, 0) + usage.get(name, 0) for name in {**total, **usage}}


def report_usage(report: Reporter, usage: Mapping[str, int]) -> None:
    """Report what the rewards of a run have cost as a message to the user; nothing if none of them calls."""
    if not usage:
        return
    calls, prompt_tokens, completion_tokens, missing = (usage[name] for name in USAGE_METRICS)
    tokens = f", with {prompt_tokens:,} prompt tokens and {completion_tokens:,} completion tokens"
    report.message(
        f"The rewards took {calls:,} calls{tokens if prompt_tokens else ''}; {missing:,} scores are missing."
    )
