"""Which texts share a sequence: as TRL packs them, and without one seeing another."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from anneal.contracts.training_config.fields import TrainingConfig
from tests.properties import examples
from tests.worker.training.tiny import CORPUS, write_rows
from worker.training.data import dataset, packing
from worker.training.data.packing import Packs

ROOMS = st.integers(1, 40)


def as_trl_packs(lengths: list[int], room: int, strategy: str) -> tuple[list[list[int]], list[list[int]] | None]:
    """Tokens of each sequence, every token being its place in the stream of all texts, and lengths in each sequence."""
    ends = np.cumsum([0, *lengths])
    rows = [list(range(one, other)) for one, other in pairwise(ends)]
    packed = pack_dataset(Dataset.from_dict({"input_ids": rows}), room, strategy)
    return packed["input_ids"][:], packed["seq_lengths"][:] if strategy == "bfd" else None


def tokens_of(packs: Packs, lengths: list[int], strategy: str) -> list[list[int]]:
    """The same of ours."""
    values = np.arange(sum(lengths), dtype=np.int32)
    if strategy == "bfd":
        values = packing.reorder_values(values, np.array(lengths, np.int32), packs.order)
    return [values[one:other].tolist() for one, other in pairwise(packs.tokens)]


class TestAsTrl:
    @examples(30)
    @given(room=ROOMS, lengths=st.data())
    def test_best_fit_makes_the_same_packs(self, room: int, lengths: st.DataObject) -> None:
        drawn = lengths.draw(st.lists(st.integers(1, room), min_size=1, max_size=80))
        self.check_best_fit(drawn, room)

    @pytest.mark.parametrize(("texts", "room", "seed"), [(1000, 2048, 1), (1000, 128, 2), (1000, 2, 3), (317, 9999, 4)])
    def test_best_fit_makes_the_same_packs_of_lengths_as_they_come(self, texts: int, room: int, seed: int) -> None:
        drawn = np.random.default_rng(seed).lognormal(np.log(room / 8), 1.0, texts)
        self.check_best_fit(np.clip(drawn, 1, room).astype(int).tolist(), room)

    def check_best_fit(self, lengths: list[int], room: int) -> None:
        theirs, seq_lengths = as_trl_packs(lengths, room, "bfd")
        packs = packing.best_fit(np.array(lengths, np.int32), room)
        assert tokens_of(packs, lengths, "bfd") == theirs
        parts = [packs.order[one:other] for one, other in pairwise(packs.texts)]
        assert [np.array(lengths)[part].tolist() for part in parts] == seq_lengths

    @examples(30)
    @given(room=ROOMS, lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60))
    def test_a_stream_is_cut_in_the_same_places_and_knows_its_texts(self, room: int, lengths: list[int]) -> None:
        theirs, _ = as_trl_packs(lengths, room, "wrapped")
        packs = packing.pack_wrapped(np.array(lengths, np.int32), room)
        assert tokens_of(packs, lengths, "wrapped") == theirs
        text_of = np.repeat(np.arange(len(lengths)), lengths)
        parts = [packs.order[one:other] for one, other in pairwise(packs.texts)]
        assert [part.tolist() for part in parts] == [sorted({int(text_of[token]) for token in row}) for row in theirs]

    @pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
    def test_more_rows_than_are_packed_together_come_out_as_from_trl(
        self, strategy: str, tiny_model: Path, tmp_path: Path
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        rows = [{"text": CORPUS[row % 40][: 5 + row * 7 % 90]} for row in range(2300)]
        theirs = pack_dataset(
            Dataset.from_dict({"input_ids": [tokenizer(row["text"] + "<|end|>")["input_ids"] for row in rows]}),
            64, strategy,
        )  # fmt: skip
        ours = packed(tiny_model, tmp_path, rows, strategy, length=64)
        assert ours["input_ids"][:] == theirs["input_ids"][:]
        assert len({row for one in ours["rows"] for row in one}) == 2300


def packed(model: Path, folder: Path, rows: list[Any], strategy: str, length: int) -> Dataset:
    config = TrainingConfig(base_model="tiny", packing=True, extra={"packing_strategy": strategy})
    return dataset.tokenize_file(
        str(write_rows(folder / "rows.jsonl", rows)), "text", AutoTokenizer.from_pretrained(model), config,
        max_length=length, chosen=None, progress=lambda done, total: None,
    ).dataset  # fmt: skip


class TestBoundaries:
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_each_text_of_a_pack_has_the_losses_that_it_has_alone(
        self, attention: str, tiny_model: Path, tmp_path: Path
    ) -> None:
        rows = [{"text": CORPUS[row][: 10 + 9 * row]} for row in range(12)]
        sequences = packed(tiny_model, tmp_path, rows, "bfd", length=128)
        assert max(len(one) for one in sequences["seq_lengths"]) > 2, "texts do share sequences"
        model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=attention).eval()
        together = losses(model, list(sequences))  # in one batch, as the trainer has them
        alone = []
        for row in sequences:
            for start, end in pairwise(np.cumsum([0, *row["seq_lengths"]])):
                part = {name: row[name][start:end] for name in ("input_ids", "labels")}
                alone += losses(model, [{**part, "seq_lengths": [int(end - start)]}])
        assert len(together) == len(alone) == 12
        for actual, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

    def test_without_its_boundaries_a_text_has_other_losses(self, tiny_model: Path, tmp_path: Path) -> None:
        """So the test above would notice."""
        sequences = packed(tiny_model, tmp_path, [{"text": line[:60]} for line in CORPUS[:8]], "bfd", length=128)
        model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
        row = sequences[0]
        start, end = row["seq_lengths"][0], sum(row["seq_lengths"][:2])
        (as_one,) = losses(model, [{**row, "seq_lengths": [len(row["input_ids"])]}])
        assert not torch.allclose(losses(model, [row])[1], as_one[start : end - 1], atol=1e-2)


def losses(model: Any, rows: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Per-token losses of each text in one batch of sequences, made by the trainer's own collator."""
    collate = DataCollatorForLanguageModeling(pad_token_id=1, padding_free=True)
    batch = collate([{name: row[name] for name in ("input_ids", "labels", "seq_lengths")} for row in rows])
    labels = batch.pop("labels")[0]
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits[0]  # as the trainer calls it
    token_losses = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="none", ignore_index=-100)
    starts = np.cumsum([0, *(length for row in rows for length in row["seq_lengths"])]).tolist()
    return [token_losses[one : other - 1] for one, other in pairwise(starts)]
