"""A run may use the tokenizer of another model, whose tokens must be among those of its base."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tests.worker.training.data.test_dataset import CHATML
from tests.worker.training.tiny import Forks, make_job, make_tiny_model

CONFIG: dict[str, Any] = {
    "method": "lora", "lora_r": 4, "max_steps": 1, "max_seq_length": 64, "tokenizer": "other", "output": "merged",
}  # fmt: skip


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A tokenizer that ends texts with another token than the base."""
    model = make_tiny_model(tmp_path / "other", chat_template=CHATML)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.pad_token, tokenizer.eos_token
    tokenizer.save_pretrained(model)
    return model


def job(folder: Path, model: Path, chats: Path, other: Path, **attempt: Any) -> dict[str, Any]:
    named = {"name": "other", "path": str(other), "hub": None, "revision": None}
    return {**make_job(folder, model, chats, **CONFIG, **attempt), "tokenizer": named}


def test_the_data_and_the_output_have_the_other_tokenizer(
    forks: Forks, tiny_model: Path, chats: Path, other: Path, tmp_path: Path
) -> None:
    done = forks.run(job(tmp_path / "run", tiny_model, chats, other))
    assert done.result["outcome"] == "completed", done.result
    saved, published = AutoTokenizer.from_pretrained(done.output), AutoTokenizer.from_pretrained(tiny_model)
    assert (saved.chat_template, published.chat_template) == (CHATML, None)
    # The merged model ends texts where it was trained to, and where the base does.
    ends = [saved.eos_token_id, published.eos_token_id]
    assert saved.eos_token_id != published.eos_token_id
    assert GenerationConfig.from_pretrained(done.output).eos_token_id == ends
    config = AutoConfig.from_pretrained(done.output)
    assert (config.eos_token_id, config.pad_token_id) == (saved.eos_token_id, saved.pad_token_id)
    assert not [record for record in done.of("message") if "no chat template" in record["line"]]

    def reasons(attempt: int) -> list[str]:
        checkpoint = done.checkpoint(1)
        resumed = job(tmp_path / "run", tiny_model, chats, other, attempt=attempt, resume_from=checkpoint)
        return list(forks.run(resumed).of("config")[0]["facts"]["fidelity_reasons"])

    assert reasons(2) == []
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = CHATML.replace("im_start", "im_begin")
    tokenizer.save_pretrained(other)
    assert reasons(3)[0] == "The tokenizer differs from that of the checkpoint."


def test_more_tokens_than_the_base_has_end_the_run_with_both_numbers(
    forks: Forks, tiny_model: Path, chats: Path, other: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokens = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    error = forks.run(job(tmp_path / "run", tiny_model, chats, other)).result["error"]
    assert error["code"] == "config_error"
    assert f"The tokenizer of other has token ids up to {tokens}" in error["message"]
    assert f"tiny has embeddings for {tokens} tokens" in error["message"]
