"""Rows that are token ids already, as Axolotl and Together take them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worker.training.data.remarks import Remark
from worker.training.data.tokenization import IGNORED, BadRow, Encoded, Ints


class TokenizedEncoder:
    """Encoder of the format `tokenized`: the labels of a row are used as they are, and its padding is removed.

    Padding is what `attention_mask` leaves out; without `labels` every other token is learned.
    """

    masks = True

    def __init__(self, vocabulary: int) -> None:
        """Prepare an encoder for a model with `vocabulary` token ids."""
        self._vocabulary = vocabulary

    def prepare(self, row: dict[str, Any], number: int) -> Encoded:
        """Check a row, and return its tokens and labels."""
        ids = self._read_ints(row, "input_ids")
        labels = ids.copy() if row.get("labels") is None else self._read_ints(row, "labels", len(ids))
        mask = np.ones(len(ids), bool)
        if row.get("attention_mask") is not None:
            mask = self._read_ints(row, "attention_mask", len(ids)) != 0
        for name, values in (("input_ids", ids[mask]), ("labels", labels[mask & (labels != IGNORED)])):
            if len(values) and not 0 <= int(values.min()) <= int(values.max()) < self._vocabulary:
                outside = next(int(value) for value in values if not 0 <= value < self._vocabulary)
                raise BadRow(
                    f"`{name}` has the token id {outside}, and the base model has {self._vocabulary} tokens (0 to "
                    f"{self._vocabulary - 1}): tokenize the rows with its tokenizer"
                )
        return Encoded(ids[mask], labels[mask])

    def encode(self, prepared: Sequence[Encoded]) -> list[Encoded]:
        """Return the rows, which are encoded already."""
        return list(prepared)

    def remarks(self, total: int) -> list[Remark]:
        """Return no remarks: a row is used as it is."""
        return []

    def _read_ints(self, row: dict[str, Any], name: str, length: int | None = None) -> Ints:
        try:
            # With the type of the tokens, numbers with a fraction, which a plugin may return, would be cut.
            is_whole = np.array(row[name]).dtype.kind == "i"
            values = np.array(row[name], np.int32)
        except (ValueError, OverflowError, TypeError) as error:
            raise BadRow(f"`{name}` is not a list of integers") from error
        if not is_whole:
            raise BadRow(f"`{name}` is not a list of integers")
        if values.ndim != 1 or len(values) != (len(values) if length is None else length):
            raise BadRow(f"`{name}` is not a list of as many integers as `input_ids`")
        return values
