"""Rows of a micro-batch without padding: the same run as with it, wherever the attention can separate them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import DeviceCapabilities
from tests.worker.training.tiny import Forks, Outcome, make_chat_dataset, make_job, make_tiny_model
from worker.training.data.dataset import BORDERS, RowIdCollator
from worker.training.failures import TrainingFailure
from worker.training.methods import preparation
from worker.training.methods.sft import SupervisedTrainer

COMMON: dict[str, Any] = {
    "method": "full", "max_seq_length": 128, "max_steps": 6, "logging_steps": 1, "save_steps": 100, "batch_size": 3,
    "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "optim": "adamw_torch", "eval_split": 0.2, "eval_steps": 3,
}  # fmt: skip
GPU = DeviceCapabilities(kind="cuda", bf16=True)
CPU = DeviceCapabilities(kind="cpu", bf16=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout, whose random numbers depend on the layout of a batch."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "plain")


def test_borders_on_the_host_are_those_of_the_positions_and_left_out_where_a_plugin_has_changed_them() -> None:
    rows = [{"input_ids": list(range(3, 3 + length)), "rows": [length]} for length in (9, 1, 33)]
    collate = DataCollatorForLanguageModeling(pad_token_id=1, padding_free=True)
    assert RowIdCollator(collate)(rows)[BORDERS] == [0, 9, 10, 43]
    assert RowIdCollator(collate)(rows[:1])[BORDERS] == [0, 9]
    assert BORDERS not in RowIdCollator(DataCollatorForLanguageModeling(pad_token_id=1))(rows)

    def restart(examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = collate(examples)
        batch["position_ids"][0, 5:9] = torch.arange(4)
        return batch

    assert BORDERS not in RowIdCollator(restart)(rows)


def figures(outcome: Outcome) -> tuple[list[float], list[list[int]], list[float], list[float]]:
    """Losses, rows and token counts of the steps, and what evaluations measured."""
    assert outcome.result["outcome"] == "completed", outcome.result
    losses = [float.fromhex(loss) for loss, _ in outcome.steps.values()]
    rows = [sorted(rows) for _, rows in outcome.steps.values()]
    tokens = [record["extra"]["tokens"] for record in outcome.of("metric")]
    names = ("eval_loss", "eval_token_accuracy", "eval_perplexity", "eval_entropy")
    return losses, rows, tokens, [record["metrics"][name] for record in outcome.of("eval") for name in names]


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.full),
        pytest.param({"method": "qlora", "lora_dropout": 0.0}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_run_without_padding_has_the_losses_rows_tokens_and_evaluations_of_one_with_it(
    more: dict[str, Any], forks: Forks, model: Path, tmp_path: Path
) -> None:
    data = make_chat_dataset(tmp_path / "chats.jsonl", 40)
    free, padded = (
        forks.run(make_job(tmp_path / name, model, data, **COMMON | more, extra=extra))
        for name, extra in (("free", {}), ("padded", {"padding_free": False}))
    )
    used = [outcome.of("config")[0]["effective"]["extra"]["padding_free"] for outcome in (free, padded)]
    assert used == [True, False]
    (losses, rows, tokens, evaluated), others = figures(free), figures(padded)
    assert losses == pytest.approx(others[0], rel=1e-5)
    assert (rows, tokens) == others[1:3]
    assert evaluated == pytest.approx(others[3], rel=1e-4)


def resolved(**config: Any) -> bool:
    """Return the effective `extra.padding_free` of a run with this configuration."""
    run: Any = SimpleNamespace(config=TrainingConfig(base_model="any", **config))
    is_padding_free = preparation.resolve_padding(run)
    assert run.config.extra.get("padding_free", False) is is_padding_free
    return is_padding_free


class TestResolution:
    @pytest.mark.parametrize(
        ("config", "is_free"),
        [
            ({"attn_implementation": "varlen"}, True),
            ({"attn_implementation": "flash_attention_2"}, True),
            ({"attn_implementation": "sdpa"}, False),
            ({"attn_implementation": "eager"}, False),
            ({}, False),  # the attention of a plugin's model
            ({"attn_implementation": "varlen", "packing": True}, False),
            ({"attn_implementation": "varlen", "batch_size": 1}, False),
            ({"attn_implementation": "varlen", "method": "dpo"}, False),
            ({"attn_implementation": "varlen", "neftune_noise_alpha": 5.0}, False),
            ({"attn_implementation": "varlen", "extra": {"collator": {"type": "mine"}}}, False),
            ({"attn_implementation": "varlen", "extra": {"model_factory": {"type": "mine"}}}, False),
            (
                {
                    "attn_implementation": "varlen",
                    "extra": {"collator": {"type": "mine"}, "padding_free": True},
                },
                True,
            ),
            ({"attn_implementation": "varlen", "extra": {"padding_free": False}}, False),
        ],
        ids=str,
    )
    def test_padding_is_left_out_where_that_changes_no_loss(self, config: dict[str, Any], is_free: bool) -> None:
        assert resolved(**config) is is_free

    def test_what_the_user_set_is_refused_where_the_model_cannot_separate_rows(self) -> None:
        with pytest.raises(TrainingFailure, match=r"`extra.padding_free` is true") as raised:
            resolved(attn_implementation="sdpa", extra={"padding_free": True})
        assert raised.value.code == "config_error"


def multiple(machine: DeviceCapabilities, length: int, limit: int, **config: Any) -> int | None:
    run: Any = SimpleNamespace(machine=machine, config=TrainingConfig(base_model="any", **config))
    architecture = LlamaConfig(max_position_embeddings=limit)
    setup: Any = SimpleNamespace(base=SimpleNamespace(architecture=architecture), tokenizer=None, max_length=length)
    return preparation.padding_multiple(run, setup)


class TestLengths:
    def test_on_a_gpu_are_multiples_of_64_unless_the_model_or_the_noise_forbids_it(self) -> None:
        assert multiple(GPU, 2048, 4096) == multiple(GPU, 1000, 1024) == 64
        assert multiple(CPU, 2048, 4096) is None
        assert multiple(GPU, 1000, 1000) is None, "positions would exceed the limit"
        assert multiple(GPU, 2048, 4096, neftune_noise_alpha=5.0) is None

    def test_that_are_multiples_of_64_change_no_loss(self, model: Path) -> None:
        network = AutoModelForCausalLM.from_pretrained(model, attn_implementation="varlen").eval()
        rows = [{"input_ids": list(range(3, 3 + length))} for length in (9, 70, 33)]
        losses = []
        for step in (None, 64):
            batch = DataCollatorForLanguageModeling(pad_token_id=1, pad_to_multiple_of=step)(rows)
            assert batch["input_ids"].shape[1] == (70 if step is None else 128)
            with torch.no_grad():
                losses.append(network(**batch, use_cache=False).loss)
        torch.testing.assert_close(*losses)


def test_metric_functions_get_each_row_of_a_batch_without_padding_by_itself(model: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(model, attn_implementation="varlen").eval()
    rows = [{"input_ids": list(range(3, 3 + length))} for length in (9, 1, 33)]
    batch = DataCollatorForLanguageModeling(pad_token_id=1, padding_free=True)(rows)
    received: list[tuple[torch.Tensor, torch.Tensor]] = []
    metrics = SimpleNamespace(update=lambda *tensors: received.append(tensors))
    trainer: Any = SimpleNamespace(_prepare_inputs=lambda inputs: inputs, own_metrics=metrics)
    with torch.no_grad():
        SupervisedTrainer.update_own_metrics(trainer, network, batch)
        for (logits, labels), row in zip(received, (rows[0], rows[2]), strict=True):
            ids = torch.tensor([row["input_ids"]])
            assert torch.equal(labels[0, 1:], ids[0, 1:])
            torch.testing.assert_close(logits, network(ids).logits)
