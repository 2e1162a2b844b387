"""Similarities of two texts, by the libraries that define them.

Does not import torch.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from anneal.contracts.rewards import SimilarityMetric


def common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, computed with a bit for each item of `first`.

    Hyyrö, "Bit-parallel LCS-length computation revisited", 2004.
    """
    places: dict[str, int] = defaultdict(int)
    for at, item in enumerate(first):
        places[item] |= 1 << at
    every = unmatched = (1 << len(first)) - 1
    for item in second:
        matches = unmatched & places.get(item, 0)
        unmatched = ((unmatched + matches) | (unmatched - matches)) & every
    return len(first) - unmatched.bit_count()


def rouge_l(text: str, reference: str) -> float:
    """Return what `RougeScorer(["rougeL"])` does, whose table takes seconds for long texts."""
    # Not for every training process: nltk, of rouge-score, takes half a second to import.
    from rouge_score.scoring import fmeasure
    from rouge_score.tokenizers import DefaultTokenizer

    words = DefaultTokenizer()
    answer, expected = words.tokenize(text), words.tokenize(reference)
    common = common_length(answer, expected)
    return float(fmeasure(common / len(answer), common / len(expected))) if common else 0.0


def corpus_metric(name: str, **options: Any) -> Any:
    """Return a metric of sacrebleu."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    return {"bleu": BLEU, "chrf": CHRF}[name](**options)


def similarity(metric: SimilarityMetric) -> Callable[[str, str], float]:
    """Return the function that computes a similarity, from 0 to 1, of a text and its reference."""
    if metric.startswith("rouge_") and metric != "rouge_l":
        return partial(_rouge_n, f"rouge{metric[-1]}")
    return _SIMILARITIES[metric]


def _fuzzy_match(text: str, reference: str) -> float:
    # As `ratio` of rapidfuzz, which OpenAI uses.
    length = len(text) + len(reference)
    return 2 * common_length(text, reference) / length if length else 1.0


def _rouge_n(name: str, text: str, reference: str) -> float:
    return float(_rouge_scorer(name).score(reference, text)[name].fmeasure)


@cache
def _rouge_scorer(name: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([name])


def _bleu(text: str, reference: str) -> float:
    return min(float(_sentence_bleu().sentence_score(text, [reference]).score) / 100, 1.0)


@cache
def _sentence_bleu() -> Any:
    return corpus_metric("bleu", effective_order=True)


def _gleu(text: str, reference: str) -> float:
    from nltk.translate.gleu_score import sentence_gleu  # type: ignore[import-untyped]

    words = _words()
    return float(sentence_gleu([words(reference).split()], words(text).split()))


@cache
def _words() -> Any:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()  # type: ignore[no-untyped-call]


_SIMILARITIES: Mapping[str, Callable[[str, str], float]] = {
    "fuzzy_match": _fuzzy_match,
    "bleu": _bleu,
    "gleu": _gleu,
    "rouge_l": rouge_l,
}
