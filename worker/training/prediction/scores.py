"""Scores of answers: comparisons with the references by the libraries that define them, and rewards."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from anneal.contracts.prompts import SCORES, PredictOptions
from anneal.contracts.rewards import metric_names
from worker.training.context import TrainingContext
from worker.training.methods.rlhf import build_rewards
from worker.training.methods.text_comparison import corpus_metric, rouge_l
from worker.training.prediction.generation import Answer
from worker.training.prediction.rows import Prompt
from worker.training.reward_services.service_scorer import add_usage, take_usage

Scores = dict[str, float | None]
Compare = Callable[[str, str], float | None]
"""Value of a score for a text and its reference; None: the reference is none for this score."""


@cache
def _comparisons() -> Mapping[str, Compare]:
    """Return the scores by a reference, by name."""
    bleu, chrf = corpus_metric("bleu", effective_order=True), corpus_metric("chrf")
    return {
        "exact_match": lambda text, reference: float(text.strip() == reference.strip()),
        # Every text contains an empty one.
        "contains": lambda text, reference: float(reference.strip() in text) if reference.strip() else None,
        "rouge_l": rouge_l,
        "bleu": lambda text, reference: float(bleu.sentence_score(text, [reference]).score),
        "chrf": lambda text, reference: float(chrf.sentence_score(text, [reference]).score),
    }


class Scorer:
    """Scorer of the answers of a run."""

    def __init__(
        self, run: TrainingContext, tokenizer: Any, options: PredictOptions, alive: Callable[[], None]
    ) -> None:
        """Load the reward models and plugins of the rewards; `alive` is called between answers, and may raise.

        Raises:
            TrainingFailure: with a stable code.
        """
        self._alive, self._state = alive, run.state
        self._compared = list(SCORES if options.scores is None else options.scores)
        self._weights = [reward.weight for reward in options.rewards]
        self._rewards = [f"reward_{name}" for name in metric_names(options.rewards)]
        self._functions = build_rewards(run, options.rewards, tokenizer, None, alive)

    @property
    def names(self) -> list[str]:
        """Names of all scores that a row may have."""
        return [*self._compared, *self._rewards, *(["reward"] if self._rewards else [])]

    def score_answers(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Scores]:
        """Return the scores of each answer; those by a reference only where there is one."""
        scores: list[Scores] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            reference = prompt.reference
            compared = [] if reference is None else self._compared
            scores.append({name: _comparisons()[name](answer.text, reference or "") for name in compared})
            self._alive()
        for is_chat in (False, True):  # a reward function gets prompts of one kind
            places = [at for at, prompt in enumerate(prompts) if isinstance(prompt.received, list) is is_chat]
            for name, function in zip(self._rewards, self._functions, strict=True):
                values = self._reward(function, [prompts[at] for at in places], [answers[at] for at in places])
                for at, value in zip(places, values, strict=True):
                    scores[at][name] = None if value is None or not math.isfinite(value) else value
        for of_row in scores:
            if self._rewards:
                values = [of_row[name] for name in self._rewards]
                known = [value for value in values if value is not None]
                weighted = sum(weight * value for weight, value in zip(self._weights, known, strict=False))
                of_row["reward"] = weighted if len(known) == len(values) else None
        return scores

    def _reward(self, function: Any, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float | None]:
        """Call a reward function as TRL does."""
        if not prompts:
            return []
        is_chat = isinstance(prompts[0].received, list)
        texts = [answer.text for answer in answers]
        try:
            values: list[float | None] = function(
                prompts=[prompt.received for prompt in prompts],
                completions=[[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
                completion_ids=[answer.tokens for answer in answers],
                answer=[prompt.reference for prompt in prompts],
                item=[prompt.item for prompt in prompts],
            )
        finally:
            self._state.reward_usage = add_usage(self._state.reward_usage, take_usage([function]))
        return values


class Totals:
    """Scores of a whole dataset, from those of its rows; BLEU and chrF are those of sacrebleu for the corpus."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._sums: dict[str, float] = dict.fromkeys(names, 0.0)
        self._counts: dict[str, int] = dict.fromkeys(names, 0)
        self._corpora = {name: corpus_metric(name) for name in ("bleu", "chrf")}
        self._statistics: dict[str, list[float]] = {}
        self._answered = self._cut = self._tokens = 0

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of the output."""
        answered = [row for row in rows if row["prediction"] is not None]
        for row in answered:
            self._answered += 1
            self._cut += row["finish_reason"] == "length"
            self._tokens += row["completion_tokens"]
            for name, value in row["scores"].items():
                if value is not None:
                    self._sums[name] += value
                    self._counts[name] += 1
        for name, metric in self._corpora.items():
            pairs = [(row["prediction"], row["reference"]) for row in answered if name in row["scores"]]
            if pairs:
                # As `corpus_score` does it, which needs all texts at once.
                texts, references = zip(*pairs, strict=True)
                statistics = metric._extract_corpus_statistics(texts, [references])
                before = [self._statistics[name]] if name in self._statistics else []
                self._statistics[name] = [sum(values) for values in zip(*before, *statistics, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the `eval` event; `eval_score` is the one by which predictions are ranked.

        That is the reward, if there are rewards, else the first score.
        """
        totals = {name: self._sums[name] / count for name, count in self._counts.items() if count}
        for name, statistics in self._statistics.items():
            totals[name] = float(self._corpora[name]._aggregate_and_compute([statistics]).score)
        ranking = next((totals[name] for name in ("reward", *self._names) if name in totals), None)
        return {f"eval_{name}": value for name, value in totals.items()} | {
            **({} if ranking is None else {"eval_score": ranking}),
            "eval_rows": self._answered,
            "eval_completion_length": self._tokens / max(self._answered, 1),
            "eval_completions_cut": self._cut / max(self._answered, 1),
        }
