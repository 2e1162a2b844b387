"""Promises about the parts of sequences: together they are the whole, with the target of every token."""

from typing import Any

import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from worker.training.data.dataset import RowIdCollator
from worker.training.data.rank_share import RankShareCollator
from worker.training.data.sequence_share import WHOLE, SequenceShareCollator

_PAD = 99
ROWS = [
    {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, 4, 5], "rows": [7]},
    {"input_ids": [6, 7, 8], "labels": [-100, 7, 8], "rows": [8]},
]
PACKED = [
    {"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, 4, 5], "seq_lengths": [3, 2], "rows": [7, 8]},
    {"input_ids": [6, 7], "labels": [6, 7], "seq_lengths": [2], "rows": [9]},
]


def parts(rows: list[dict[str, Any]], count: int, **options: Any) -> list[dict[str, Any]]:
    collate = RowIdCollator(DataCollatorForLanguageModeling(pad_token_id=_PAD, **options))
    return [SequenceShareCollator(collate, part, count, _PAD)(rows) for part in range(count)]


def joined(batches: list[dict[str, Any]], name: str) -> list[list[int]]:
    values: list[list[int]] = torch.cat([one[name] for one in batches], dim=1).tolist()
    return values


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_the_parts_are_the_whole_with_the_target_of_every_token(count: int) -> None:
    batches = parts(ROWS, count)
    assert len({one["input_ids"].shape for one in batches}) == 1, "parts are equal"
    padding = -5 % count
    assert joined(batches, "input_ids") == [[1, 2, 3, 4, 5] + [_PAD] * padding, [6, 7, 8] + [_PAD] * (2 + padding)]
    targets = [[-100, 3, 4, 5, -100], [7, 8, -100, -100, -100]]
    assert joined(batches, "shift_labels") == [row + [-100] * padding for row in targets]
    labels = [[-100, -100, 3, 4, 5], [-100, 7, 8, -100, -100]]
    assert joined(batches, "labels") == [row + [-100] * padding for row in labels]
    assert joined(batches, "attention_mask") == [[1] * 5 + [0] * padding, [1] * 3 + [0] * (2 + padding)]
    assert joined(batches, "position_ids") == [list(range(5 + padding))]
    assert [one["rows"] for one in batches] == [[7, 8]] + [[]] * (count - 1), "rows count once"


def test_packed_texts_keep_their_positions_and_padding_is_a_text_of_its_own() -> None:
    batches = parts(PACKED, 4, padding_free=True)
    positions = [0, 1, 2, 0, 1, 0, 1, 0]
    assert joined(batches, "position_ids") == [positions]
    assert joined(batches, "shift_labels") == [[2, 3, -100, 5, -100, 7, -100, -100]], "no text predicts the next one"
    assert sum(int(one["attention_mask"].sum()) for one in batches) == 7
    for batch in batches:
        whole = batch[WHOLE]
        assert whole.positions.tolist() == [positions] and whole.mask is None
        assert whole.kernel_options["cu_seq_lens_q"].tolist() == [0, 3, 5, 7, 8]
        assert whole.kernel_options["max_length_k"] == 3


def test_devices_without_a_row_have_one_that_teaches_nothing() -> None:
    shares = [RankShareCollator(lambda rows: parts(rows, 2)[0], group, 2)(ROWS[:1]) for group in (0, 1)]
    assert [one["rows"] for one in shares] == [[], [7]]
    assert (shares[0]["shift_labels"] == -100).all() and (shares[0]["labels"] == -100).all()
    assert (shares[1]["shift_labels"] != -100).any()
