"""Packing: which texts share a sequence, and where each text starts in it.

The packs are those of TRL's `pack_dataset`, which packs every thousand rows separately, so a run trains on the same
sequences as with plain TRL. They are computed faster, and a thousand rows at a time need little memory.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from worker.training.data.token_cache import Write
from worker.training.data.tokenization import IGNORED, Encoded, Ints

ROWS_AT_A_TIME = 1000
"""Rows that may share sequences; the number used by TRL, since another one would make other packs."""


@dataclass(frozen=True)
class Packs:
    """Assignment of texts to sequences."""

    order: npt.NDArray[np.int64]
    """Numbers of the texts, from 0, in the order of the sequences."""
    texts: npt.NDArray[np.int64]
    """Shape (sequences + 1,): index in `order` at which each sequence starts, and the end of the last."""
    tokens: npt.NDArray[np.int64]
    """Shape (sequences + 1,): the same in tokens."""


def best_fit(lengths: Ints, room: int) -> Packs:
    """Pack by best fit, longest texts first (TRL's `bfd`); no text is cut, no sequence exceeds `room` tokens.

    The trainer's collator restarts `position_ids` at each text, so no token attends to another text.

    Args:
        lengths: shape (texts,), tokens of each text, from 1 to `room`.
        room: maximum tokens of a sequence.
    """
    by_length = np.argsort(-lengths, kind="stable")
    packs: list[list[int]] = []
    packs_with: dict[int, deque[int]] = defaultdict(deque)
    """Packs by their free room, the one that has had it longest first."""
    # One bit for every amount of free room among the packs, and one for a new pack: the lowest bit at or above the
    # length of a text is its best fit, found in one shift instead of a tree search.
    rooms = 1 << room
    for text, length in zip(by_length.tolist(), lengths[by_length].tolist(), strict=True):
        fitting = rooms >> length
        left = length + (fitting & -fitting).bit_length() - 1
        if left < room:
            pack = packs_with[left].popleft()
            if not packs_with[left]:
                rooms ^= 1 << left
        else:
            pack = len(packs)
            packs.append([])
        packs[pack].append(text)
        left -= length
        if left > 0:
            packs_with[left].append(pack)
            rooms |= 1 << left
    order = np.fromiter((text for pack in packs for text in pack), np.int64, len(lengths))
    texts = np.cumsum([0, *map(len, packs)])
    ends = np.concatenate(([0], np.cumsum(lengths[order], dtype=np.int64)))
    return Packs(order, texts, ends[texts])


def pack_wrapped(lengths: Ints, room: int) -> Packs:
    """Pack as one stream, cut every `room` tokens (TRL's `wrapped`); no room is unused, and texts are cut anywhere.

    Texts in a sequence are *not* separated: positions count through all of it, and a token attends to every earlier
    text in it. A text that is cut continues in the next sequence without its beginning. The last sequence is the
    remainder. A text that is in two sequences is listed in both.

    Args:
        lengths: shape (texts,), tokens of each text, from 1.
        room: tokens of a sequence.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    tokens = np.append(np.arange(0, total, room, dtype=np.int64), total)
    first = np.searchsorted(ends, tokens[:-1], side="right")
    last = np.searchsorted(ends, tokens[1:], side="left")
    texts = np.concatenate(([0], np.cumsum(last - first + 1)))
    order = np.concatenate([np.arange(one, other + 1) for one, other in zip(first, last, strict=True)] or [first])
    return Packs(order, texts, tokens)


def one_per_sequence(lengths: Ints) -> Packs:
    """Make one sequence of each text."""
    texts = np.arange(len(lengths) + 1, dtype=np.int64)
    return Packs(texts[:-1], texts, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))


def reorder_values(values: Ints, lengths: Ints, order: npt.NDArray[np.int64]) -> Ints:
    """Reorder the concatenated values of texts to the `order` of the texts; `lengths` has those of the texts."""
    taken = lengths[order].astype(np.int64)
    begins = np.cumsum(lengths, dtype=np.int64) - lengths
    moves = begins[order] - (np.cumsum(taken) - taken)
    taken_from: Ints = values[np.repeat(moves, taken) + np.arange(taken.sum())]
    return taken_from


class Sequences:
    """Writer of sequences from encoded rows, a thousand rows at a time."""

    def __init__(self, write: Write, schema: pa.Schema, room: int, strategy: str | None) -> None:
        self.room = room
        self.strategy = strategy
        self.rows = self.tokens = self.highest_id = 0
        self.teaches = False
        """True if there is a token to learn in any sequence."""
        self._write = write
        self._schema = schema
        self._numbers: list[int] = []
        self._encoded: list[Encoded] = []

    def add_row(self, number: int, encoded: Encoded) -> None:
        """Add the row with this number."""
        self.rows += 1
        self._numbers.append(number)
        self._encoded.append(encoded)
        if len(self._numbers) == ROWS_AT_A_TIME:
            self.write_rows()

    def write_rows(self) -> None:
        """Write the rows added since the last call."""
        texts = [(number, one) for number, one in zip(self._numbers, self._encoded, strict=True) if len(one.ids)]
        self._numbers, self._encoded = [], []
        if not texts:
            return
        numbers = np.array([number for number, _ in texts], np.int32)
        lengths = np.array([len(one.ids) for _, one in texts], np.int32)
        packs = self._pack_texts(lengths)
        columns: dict[str, Ints] = {"input_ids": np.concatenate([one.ids for _, one in texts])}
        labels = [one.labels for _, one in texts if one.labels is not None]
        if labels:
            columns["labels"] = np.concatenate(labels)
        self.tokens += len(columns["input_ids"])
        self.highest_id = max(self.highest_id, int(columns["input_ids"].max()))
        if self.strategy == "bfd":
            columns = {name: reorder_values(values, lengths, packs.order) for name, values in columns.items()}
        predicted = columns.get("labels", columns["input_ids"]) != IGNORED
        predicted[packs.tokens[:-1]] = False
        self.teaches = self.teaches or bool(predicted.any())
        arrays = {name: _list_array(values, packs.tokens) for name, values in columns.items()}
        arrays["rows"] = _list_array(numbers[packs.order], packs.texts)
        if self.strategy == "bfd":
            arrays["seq_lengths"] = _list_array(lengths[packs.order], packs.texts)
        self._write(pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema))

    def _pack_texts(self, lengths: Ints) -> Packs:
        if self.strategy == "bfd":
            return best_fit(lengths, self.room)
        if self.strategy == "wrapped":
            return pack_wrapped(lengths, self.room)
        return one_per_sequence(lengths)


def _list_array(values: Ints, ends: npt.NDArray[np.int64]) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values, pa.int32()))
