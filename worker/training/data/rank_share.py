"""The share of a batch that one device of several trains on, so that each row of an epoch is trained once."""

from collections.abc import Callable
from typing import Any

IGNORED = -100
"""Label of a token that no loss counts."""


class RankShareCollator:
    """A collator that is given the rows of all devices and builds the batch of one of them.

    The last batch of an epoch may have fewer rows than devices. A device without a row then gets one whose labels are
    all ignored, since every device must take part in the exchange of gradients.
    """

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]], rank: int, size: int) -> None:
        self._collate = collate
        self._rank = rank
        self._size = size

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the batch, with its part of the rows of all devices, times their number, as `share`."""
        first, end = (len(examples) * rank // self._size for rank in (self._rank, self._rank + 1))
        own = examples[first:end]
        batch = self._collate(own or examples[:1])
        if not own:
            batch["rows"] = []
            for name in ("labels", "shift_labels"):
                if name in batch:
                    batch[name].fill_(IGNORED)
        batch["share"] = len(own) * self._size / len(examples)
        return batch
