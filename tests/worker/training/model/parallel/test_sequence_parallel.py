"""Promises about the groups of ranks that share sequences."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from worker.training.model.parallel.sequence_parallel import SequenceParallel
from worker.training.ranks import NEVER, Ranks


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process, whose models keep their attention."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "register", lambda *_: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_group_waits_for_a_rank_that_loads_slowly() -> None:
    """It has no time-out of its own: the first exchange follows the load, which takes one rank longer than another."""
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    with torch.device("meta"):
        parallel = SequenceParallel(LlamaForCausalLM(config), Ranks())
    backend = parallel._group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == NEVER
