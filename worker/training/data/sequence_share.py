"""The share of each sequence that one device of several trains on: consecutive positions, with their targets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from worker.training.data.rank_share import IGNORED

WHOLE = "whole"
"""Key of the `WholeSequences` in a batch."""


@dataclass(frozen=True)
class WholeSequences:
    """Positions of a batch on all devices, as its attention needs them."""

    positions: torch.Tensor
    """Shape (sequences or 1, length): positions of the tokens in their texts."""
    mask: torch.Tensor | None
    """Shape (sequences, length): 0 for what no token may attend to, else 1; None if the texts are packed."""
    kernel_options: Mapping[str, Any]
    """Borders of packed texts, as kernels for sequences of several lengths take them."""

    def to(self, device: torch.device) -> "WholeSequences":
        """Return the same on a device."""
        options = {name: one.to(device) if hasattr(one, "to") else one for name, one in self.kernel_options.items()}
        mask = None if self.mask is None else self.mask.to(device)
        return WholeSequences(self.positions.to(device), mask, options)


class SequenceShareCollator:
    """A collator that keeps one of `count` equal parts of each sequence that another collator makes.

    Targets are labels that were shifted before the division, so that the target of the last token of a part is the
    first token of the next one. Sequences are padded at the end to a length that can be divided. The first part has the
    row numbers.
    """

    def __init__(
        self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]], part: int, count: int, pad_token_id: int
    ) -> None:
        self._collate = collate
        self._part = part
        self._count = count
        self._pad_token_id = pad_token_id

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the part of a batch, with `shift_labels`, positions, and the `WholeSequences`."""
        batch = self._collate(examples)
        ids, labels = batch["input_ids"], batch["labels"]
        length = ids.shape[1]
        missing = -length % self._count
        targets = _pad_right(
            torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1), missing, IGNORED
        )
        mask = batch.get("attention_mask", torch.ones_like(ids))
        is_packed = "position_ids" in batch
        if is_packed:  # padding is one more text
            positions = torch.cat([batch["position_ids"], torch.arange(missing).expand(len(ids), -1)], dim=1)
        else:
            positions = torch.arange(length + missing)[None]
        own = slice(*((length + missing) * part // self._count for part in (self._part, self._part + 1)))
        return {
            "input_ids": _pad_right(ids, missing, self._pad_token_id)[:, own],
            "attention_mask": _pad_right(mask, missing, 0)[:, own],
            "position_ids": positions[:, own],
            "labels": _pad_right(labels, missing, IGNORED)[:, own].clone(),
            "shift_labels": targets[:, own].clone(),
            "rows": batch["rows"] if self._part == 0 else [],
            # No token before the padding attends to it, so it needs no mask where there was none.
            WHOLE: WholeSequences(
                positions, None if is_packed else _pad_right(mask, missing, 1), _kernel_options(batch, missing)
            ),
        }


def _kernel_options(batch: Mapping[str, Any], missing: int) -> dict[str, Any]:
    """Return the borders of the texts with that of the padding."""
    if "cu_seq_lens_q" not in batch:
        return {}
    borders, longest = batch["cu_seq_lens_q"], batch["max_length_q"]
    if missing:
        borders = torch.cat([borders, borders[-1:] + missing])
    longest = max(longest, missing)
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


def _pad_right(tensor: torch.Tensor, missing: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, missing), value=value)
