"""The bytes that a step holds on to are those that torch holds, within a tenth; `make estimates` shows a wider grid."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AttentionMaskInterface

from app.estimator.forward_pass import Batch
from benchmarks.estimates import WITHIN, Cell, built, estimated, measured
from worker.training.model.parallel.sequence_parallel import SequenceParallel
from worker.training.ranks import Ranks

_PADDED = Batch(2, 64, masked=True)
CELLS = [
    Cell("llama", "full", "sdpa", Batch(3, 40), "off"),
    Cell("llama", "lora", "sdpa", _PADDED, "off"),
    Cell("llama", "lora", "eager", Batch(1, 96), "selective"),
    Cell("llama", "lora", "sdpa", Batch(1, 96, masked=True, positions_each=True), "off"),
    Cell("llama", "lora", "varlen", Batch(1, 96, texts=2, positions_each=True), "off"),
    Cell("llama", "lora", "varlen", _PADDED, "off"),
    Cell("qwen3", "qlora", "varlen", Batch(1, 96, texts=2, positions_each=True), "selective"),
    Cell("gemma3_text", "full", "varlen", Batch(1, 96, texts=2, positions_each=True), "off", mixed=True),
    Cell("phi3", "lora", "varlen", Batch(1, 96, texts=2, positions_each=True), "off"),
    Cell("llama", "qlora", "sdpa", Batch(2, 48), "off"),
    Cell("llama", "dora", "sdpa", Batch(4, 40), "full"),
    Cell("llama", "dpo", "sdpa", Batch(4, 48, masked=True), "off"),
    Cell("llama", "lora", "sdpa", Batch(2, 48), "off", mixed=True),
    Cell("gemma3_text", "full", "sdpa", Batch(2, 48), "off", mixed=True),
    Cell("gemma2", "lora", "eager", _PADDED, "off"),
    Cell("qwen3", "qlora", "eager", Batch(2, 64), "selective"),
    Cell("phi", "full", "sdpa", _PADDED, "off"),
    Cell("phi3", "lora", "sdpa", Batch(2, 40), "off"),
    Cell("gpt2", "full", "eager", Batch(2, 40), "full"),
    Cell("gpt2", "lora", "sdpa", Batch(2, 64), "off"),
]


def name(cell: Cell) -> str:
    return f"{cell.family}-{cell.method}-{cell.attention}-{cell.checkpointing}"


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_a_forward_pass_holds_the_bytes_of_the_formula(cell: Cell) -> None:
    torch.manual_seed(0)
    model, described = built(cell)
    assert estimated(described, cell)[0] == pytest.approx(measured(model, cell), rel=WITHIN)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """The first of four ranks that share each sequence, without the others: only sizes matter here."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    ranks = Ranks(0, 4)
    ranks.per_sequence = 4
    yield ranks
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "cell",
    [
        Cell("llama", "full", "sdpa", Batch(1, 96, sequence_parallel=4), "off"),
        Cell("llama", "lora", "sdpa", Batch(3, 96, sequence_parallel=4, positions_each=False), "full"),
        Cell("qwen3", "lora", "sdpa", Batch(2, 96, sequence_parallel=4), "off", mixed=True),
        Cell("llama", "qlora", "sdpa", Batch(1, 96, masked=True, positions_each=True, sequence_parallel=4), "off"),
        Cell("llama", "lora", "varlen", Batch(1, 96, texts=2, positions_each=True, sequence_parallel=4), "off"),
        Cell("gpt2", "lora, no dropout", "sdpa", Batch(2, 64, sequence_parallel=4), "selective"),
    ],
    ids=name,
)
def test_a_device_holds_its_part_of_sequences_that_several_share(cell: Cell, ranks: Ranks) -> None:
    torch.manual_seed(0)
    model, described = built(cell)
    divided = SequenceParallel(model, ranks)
    assert estimated(described, cell)[0] == pytest.approx(measured(model, cell, divided), rel=WITHIN)
