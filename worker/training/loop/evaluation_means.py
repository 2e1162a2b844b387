"""Means over an evaluation, from the means of its batches."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

BatchMeans = Mapping[str, list[float]]
"""Means of the batches so far, by metric, as TRL's trainers collect them."""


Part = tuple[list[tuple[float, int]], dict[str, tuple[list[float], list[int]]]]
"""Losses of batches with their terms; and by metric the means of batches, and their terms."""


class EvaluationMeans:
    """Means over an evaluation in which each target token, or each row, counts the same.

    transformers and TRL average the means of batches, so their results depend on the batch size.
    """

    def __init__(self) -> None:
        self._losses: list[tuple[float, int]] = []
        self._terms: dict[str, list[int]] = defaultdict(list)

    def add_batch(self, loss: float, terms: int, metrics: BatchMeans) -> None:
        """Add a batch with its number of terms; `metrics` holds the means of earlier batches too."""
        self._losses.append((loss, terms))
        for name, means in metrics.items():
            self._terms[name] += [terms] * (len(means) - len(self._terms[name]))

    @property
    def loss(self) -> float:
        """Mean loss."""
        return _weighted_mean(self._losses)

    def own_part(self, metrics: BatchMeans) -> Part:
        """Return what this rank has measured, for `merge`."""
        return self._losses, {name: (list(means), self._terms[name]) for name, means in metrics.items()}

    def merge_parts(self, parts: Sequence[Part], metrics: dict[str, list[float]]) -> None:
        """Take over what all ranks have measured; `metrics` then holds the means of all batches."""
        self._losses = [pair for losses, _ in parts for pair in losses]
        self._terms = defaultdict(list)
        metrics.clear()
        for _, measured in parts:
            for name, (means, terms) in measured.items():
                metrics.setdefault(name, []).extend(means)
                self._terms[name] += terms

    def reduce_metrics(self, metrics: BatchMeans) -> None:
        """Replace the means of all batches by one; NaN, which stands for a batch without rewards, is ignored."""
        for name, means in metrics.items():
            known = [pair for pair in zip(means, self._terms[name], strict=True) if not math.isnan(pair[0])]
            means[:] = [_weighted_mean(known)] if known else means[:1]


def _weighted_mean(weighted: list[tuple[float, int]]) -> float:
    return sum(value * terms for value, terms in weighted) / max(sum(terms for _, terms in weighted), 1)
