"""Beside plain TRL on the same data, seed and settings: the same losses."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import qwen3_chat_template

from tests.worker.training.data.test_dataset import CHATML
from tests.worker.training.tiny import CORPUS, Forks, make_job, make_tiny_model, write_rows
from worker.training.model.loader import unrounded_adapters

STEPS = 8


def plain_losses(
    model: Path, data: Path, folder: Path, lora: bool, template: str = CHATML, **options: Any
) -> list[float]:
    """Losses of TRL's trainer, used as its manual says."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    torch.set_num_threads(1)  # as in the process beside it: the order of sums depends on it
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    set_seed(42)
    quantised: dict[str, Any] = {}
    if quantization := options.pop("quantization", None):
        if "load_in_4bit" in quantization:
            quantization |= {
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": torch.float32,
                "bnb_4bit_use_double_quant": True,
            }
        quantised = {"quantization_config": BitsAndBytesConfig(**quantization), "device_map": {"": "cpu"}}
    with unrounded_adapters():  # TRL casts those on a quantized base to 16 bits
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **quantised),
            args=SFTConfig(
                output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
                learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=0.03, weight_decay=0.01,
                optim="adamw_torch", use_cpu=True, bf16=False, activation_checkpointing=False, logging_steps=1,
                report_to="none", seed=42,
                save_strategy="no", disable_tqdm=True, **options,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear"
            ) if lora else None,
        )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("method", "ours", "theirs"),
    [
        ("full", {"max_seq_length": 40}, {"max_length": 40}),
        ("lora", {"max_seq_length": 128, "packing": True}, {"max_length": 128, "packing": True}),
        ("qlora", {"max_seq_length": 60}, {"max_length": 60, "quantization": {"load_in_4bit": True}}),
        (
            "sft",
            {"max_seq_length": 60, "load_in_8bit": True},
            {"max_length": 60, "quantization": {"load_in_8bit": True}},
        ),
    ],
)
def test_losses_equal_plain_trls(
    method: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    forks: Forks,
    tiny_model: Path,
    chats: Path,
    tmp_path: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(model)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    job = make_job(
        tmp_path, model, chats, method=method, max_steps=STEPS, batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, optim="adamw_torch", logging_steps=1, **ours,
    )  # fmt: skip
    done = forks.run(job)
    assert done.result["outcome"] == "completed", done.result
    losses = [float.fromhex(loss) for loss, _ in done.steps.values()]
    assert losses == pytest.approx(plain_losses(model, chats, tmp_path / "plain", method != "full", **theirs), rel=1e-6)


def test_losses_on_prompts_and_completions_equal_plain_trls_with_the_defaults_of_both(
    forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    pairs = ({"prompt": f"what is row {n}\n", "completion": CORPUS[n % 40][: 20 + n % 50]} for n in range(40))
    path = write_rows(tmp_path / "pairs.jsonl", pairs)

    def losses(name: str, used: str, **config: str) -> list[float]:
        job = make_job(
            tmp_path / name, tiny_model, path, data_format="prompt_completion", method="full", max_steps=STEPS,
            batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, optim="adamw_torch", max_seq_length=128,
            **config,
        )  # fmt: skip
        done = forks.run(job)
        assert done.result["outcome"] == "completed", done.result
        assert done.of("config")[0]["effective"]["loss_on"] == used
        return [float.fromhex(loss) for loss, _ in done.steps.values()]

    plain = partial(plain_losses, tiny_model, path, lora=False, max_length=128)
    ours = losses("ours", "completion")
    assert ours == pytest.approx(plain(tmp_path / "plain"), abs=1e-6)
    on_all = losses("all", "all", loss_on="all")
    assert on_all == pytest.approx(plain(tmp_path / "plain-all", completion_only_loss=False), abs=1e-6)
    assert ours != pytest.approx(on_all, abs=1e-3)


def test_losses_on_several_answers_equal_plain_trls_and_the_output_keeps_its_template(
    forks: Forks, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", chat_template=qwen3_chat_template)
    path = write_rows(
        tmp_path / "chats.jsonl",
        (
            {
                "messages": [
                    {"role": role, "content": CORPUS[(n + turn) % 40][: 8 + n % 7]}
                    for turn, role in enumerate(("user", "assistant") * 2)
                ]
            }
            for n in range(40)
        ),
    )
    job = make_job(
        tmp_path, model, path, method="full", max_steps=STEPS, batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, optim="adamw_torch", max_seq_length=256, loss_on="assistant",
    )  # fmt: skip
    done = forks.run(job)
    assert done.result["outcome"] == "completed", done.result
    plain = plain_losses(
        model, path, tmp_path / "plain", False, qwen3_chat_template, max_length=256, assistant_only_loss=True
    )
    assert [float.fromhex(loss) for loss, _ in done.steps.values()] == pytest.approx(plain, rel=1e-6)
    assert AutoTokenizer.from_pretrained(done.output).chat_template == qwen3_chat_template
    said = [record["line"] for record in done.of("message")]
    assert any("TRL's training template" in text for text in said)
    # The tokenizer here has no token for `<|im_end|>`, as a model of that family has.
    assert any("may not learn to stop" in text for text in said)
