"""Where passes cannot be measured, recomputation is chosen by the estimate and reported with its reason."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig

from anneal.contracts.attempt.repair import Repair
from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import Replacement
from anneal.contracts.training_config.rules import DeviceCapabilities
from worker.training.planning import memory_plan
from worker.training.ranks import Ranks

_LLAMA = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, attention_dropout=0.1,
)  # fmt: skip


class RanksWith(Ranks):
    """Ranks, of which another one has so many bytes free."""

    def __init__(self, free: int) -> None:
        super().__init__(size=2)
        self._free = free

    def gather_values(self, value: Any) -> list[Any]:
        return [value, self._free]


def decided(
    monkeypatch: pytest.MonkeyPatch, free: int, repairs: Any = (), ranks: Ranks | None = None, **config: Any
) -> Replacement | None:
    """Replacement for a sharded run of a small model on a GPU with this many free bytes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    config_ = TrainingConfig(base_model="any", load_in_4bit=False, method="lora", **config)
    run: Any = SimpleNamespace(
        config=config_,
        machine=DeviceCapabilities(kind="cuda", bf16=True),
        user_set_fields=set(config),
        is_inference=False,
        is_sharded=True,
        method=METHODS[config_.method],
        ranks=ranks or Ranks(),
        job=SimpleNamespace(expert_parallel=1, auto_repairs=[Repair(reason="out of memory", **one) for one in repairs]),
    )
    base: Any = SimpleNamespace(architecture=_LLAMA)
    data = Dataset.from_dict({"input_ids": [[1] * 8] * 3 + [[1] * 1024]})
    replaced: list[Replacement] = []
    memory_plan.choose_checkpointing(run, replaced, base, data, 2048)
    assert run.config.gradient_checkpointing != "auto"
    return replaced[0] if replaced else None


def test_the_less_memory_the_more_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    # 600 MiB of them are the context's.
    for megabytes in (4000, 710, 650):
        choice = decided(monkeypatch, megabytes * 2**20)
        assert choice is not None and choice.requested == "auto"
        assert "GiB" in choice.reason and "not measured" in choice.reason
        used.append(choice.used)
    assert used == [False, "selective", True]


@pytest.mark.parametrize(("own", "other"), [(4000, 650), (650, 4000)])
def test_all_ranks_recompute_what_the_device_with_the_least_memory_needs(
    monkeypatch: pytest.MonkeyPatch, own: int, other: int
) -> None:
    """Ranks that share sequences or experts exchange them again in what is recomputed, so all wait for each other."""
    choice = decided(monkeypatch, own * 2**20, ranks=RanksWith(other * 2**20))
    assert choice is not None and choice.used is True


def test_smaller_micro_batches_after_out_of_memory_recompute_as_much_as_those_that_did_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = ((4, 4), (2, 8), (1, 16))
    repairs = [
        {
            "kind": "out_of_memory",
            "changes": {"batch_size": size, "gradient_accumulation_steps": steps},
            "instead_of": {"batch_size": before, "gradient_accumulation_steps": fewer},
        }
        for (before, fewer), (size, steps) in pairwise(sizes)
    ]
    free = 710 * 2**20
    used = []
    for done, (size, steps) in enumerate(sizes):
        choice = decided(monkeypatch, free, repairs[:done], batch_size=size, gradient_accumulation_steps=steps)
        assert choice is not None and ("`batch_size` 4, which did not fit" in choice.reason) == (done > 0)
        used.append(choice.used)
    assert used == ["selective"] * 3
    alone = decided(monkeypatch, free, batch_size=1, gradient_accumulation_steps=16)
    assert alone is not None and alone.used is False, "which a repair must not choose"
    evaluated = {"kind": "out_of_memory", "changes": {"extra.eval_batch_size": 2}}
    choice = decided(monkeypatch, 2**40, [evaluated])
    assert choice is not None and choice.used is False, "evaluations need no recomputation"


@pytest.mark.parametrize("forced", [True, False, "selective"])
def test_what_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch, forced: Any) -> None:
    assert decided(monkeypatch, 2**20, gradient_checkpointing=forced) is None


def test_a_model_that_cannot_be_counted_computes_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_LLAMA.__class__, "model_type", "unheard_of")
    choice = decided(monkeypatch, 2**40)
    assert choice is not None and choice.used is True and "unheard_of" in choice.reason


@pytest.mark.parametrize(
    ("columns", "method", "longest"),
    [
        ({"input_ids": [[1] * 5, [1] * 9]}, "sft", 9),
        ({"input_ids": [[1] * 50]}, "sft", 20),
        ({"prompt_ids": [[1] * 3], "chosen_ids": [[1] * 4], "rejected_ids": [[1] * 6]}, "dpo", 9),
        ({"prompt": ["x"]}, "rlhf", 20),
    ],
)
def test_the_longest_row_is_known_before_the_weights_are_loaded(columns: Any, method: Any, longest: int) -> None:
    config = TrainingConfig(base_model="any", method=method)
    assert memory_plan.longest_row(Dataset.from_dict(columns), config, 20) == longest


def test_what_a_model_factory_makes_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = decided(monkeypatch, 4000 * 2**20, extra={"model_factory": {"type": "mine"}})
    assert choice is not None and choice.used is True and "factory" in choice.reason
