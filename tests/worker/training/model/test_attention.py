"""Every pass of a run whose weights have 32 bits computes attention in 16, so flash attention serves it too."""

from pathlib import Path
from typing import Any

import pytest

from tests.worker.training.tiny import Forks, make_chat_dataset, make_job, make_pairs, make_prompts, make_rated

CONFIG: dict[str, Any] = {
    "max_seq_length": 64, "max_steps": 2, "logging_steps": 1, "batch_size": 4, "gradient_accumulation_steps": 1,
    "optim": "adamw_torch", "eval_split": 0.4, "eval_steps": 1, "gradient_checkpointing": True, "lora_r": None,
    "save_steps": 1,
}  # fmt: skip
SAMPLES = {"sample_steps": 1, "sample_prompts": ["2 + 2 ="], "sample_max_new_tokens": 4}
RLHF = {"num_generations": 2, "max_completion_length": 8, "rewards": [{"type": "length", "max": 20}]}


@pytest.mark.parametrize(
    ("method", "data_format", "make", "more"),
    [
        ("full", "chat", make_chat_dataset, SAMPLES),
        ("dpo", "preference", make_pairs, SAMPLES),
        pytest.param("kto", "rated", make_rated, SAMPLES, marks=pytest.mark.full),
        pytest.param("reward", "preference", make_pairs, {}, marks=pytest.mark.full),
        pytest.param("rlhf", "prompt", make_prompts, {"rlhf": RLHF}, marks=pytest.mark.full),
    ],
)
def test_no_pass_of_a_method_computes_attention_in_32_bits(
    method: str, data_format: str, make: Any, more: dict[str, Any], forks: Forks, tiny_model: Path, tmp_path: Path
) -> None:
    data = make(tmp_path / "data.jsonl", 20)
    job = make_job(tmp_path / "1", tiny_model, data, data_format=data_format, method=method, **CONFIG | more)
    first = forks.run(job, half_attention=True)
    assert first.result["outcome"] == "completed", (first.result, first.stderr[-3000:])
    passes = {(one["training"], one["gradients"]) for one in first.of("attention")}
    assert passes >= {(True, True), (False, False)}
    job = make_job(
        tmp_path / "2", tiny_model, data, data_format=data_format, method=method, attempt=2,
        resume_from=first.checkpoint(1), **CONFIG | more,
    )  # fmt: skip
    again = forks.run(job, half_attention=True)  # with the check of the restored weights
    assert again.result["outcome"] == "completed", (again.result, again.stderr[-3000:])
