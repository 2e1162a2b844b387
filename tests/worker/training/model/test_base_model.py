"""A folder with an architecture and no weights: `full` trains it from random numbers, nothing else can."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.worker.training.tiny import Forks, Outcome, make_job

FULL: dict[str, Any] = {
    "method": "full", "max_seq_length": 64, "learning_rate": 1e-2, "max_steps": 4, "logging_steps": 1,
    "batch_size": 4, "gradient_accumulation_steps": 1, "optim": "adamw_torch",
}  # fmt: skip


@pytest.fixture
def architecture(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model without its weights."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def losses(outcome: Outcome) -> dict[int, str]:
    return {step: loss for step, (loss, _) in outcome.steps.items()}


def test_full_starts_from_numbers_drawn_with_the_seed_and_says_so(
    forks: Forks, architecture: Path, chats: Path, tmp_path: Path
) -> None:
    first, again, other = (
        forks.run(make_job(tmp_path / name, architecture, chats, seed=seed, **FULL))
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )

    assert first.result["outcome"] == "completed"
    assert any("from scratch" in record["line"] and "seed 1" in record["line"] for record in first.of("message"))
    assert losses(first) == losses(again)
    assert losses(first)[1] != losses(other)[1]
    AutoModelForCausalLM.from_pretrained(first.output)


def test_a_resumed_run_goes_on_with_what_it_has_learned_and_not_from_new_numbers(
    forks: Forks, architecture: Path, chats: Path, tmp_path: Path
) -> None:
    whole = forks.run(make_job(tmp_path / "whole", architecture, chats, **FULL))
    half = forks.run(make_job(tmp_path / "half", architecture, chats, stop_at_step=2, **FULL))
    rest = forks.run(
        make_job(tmp_path / "half", architecture, chats, attempt=2, resume_from=half.checkpoint(2), **FULL)
    )

    assert rest.result["outcome"] == "completed"
    assert losses(half) | losses(rest) == losses(whole)


@pytest.mark.parametrize("method", ["lora", "qlora", "sft"])
def test_an_adapter_needs_weights_to_start_from(
    method: str, forks: Forks, architecture: Path, chats: Path, tmp_path: Path
) -> None:
    error = forks.run(make_job(tmp_path, architecture, chats, **FULL | {"method": method})).result["error"]

    assert error["code"] == "config_error"
    assert "no weights" in error["message"] and "`full`" in error["message"]
