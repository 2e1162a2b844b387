"""Every method in bfloat16 under autocast, with the ways that libraries take on a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.training.cuda_autocast import cuda_autocast
from tests.worker.training.data.test_dataset import CHATML
from tests.worker.training.methods.plain_trl import plain_log
from tests.worker.training.methods.test_preferences import ADAPTERS, LENGTH, losses, measured, near_eight
from tests.worker.training.tiny import (
    Forks,
    make_chat_dataset,
    make_job,
    make_pairs,
    make_prompts,
    make_rated,
    make_tiny_model,
)

STEPS = 4
DATA: dict[str, tuple[str, str, Callable[..., Path]]] = {
    "sft": ("sft", "chat", make_chat_dataset), "packed": ("sft", "chat", make_chat_dataset),
    "dpo": ("dpo", "preference", make_pairs), "kto": ("kto", "rated", make_rated),
    "reward": ("reward", "preference", make_pairs), "grpo": ("rlhf", "prompt", make_prompts),
    "rloo": ("rlhf", "prompt", make_prompts),
}  # fmt: skip
"""Method, format and rows by what is trained."""
USUAL = {("sft", "qlora"), ("packed", "lora"), ("dpo", "qlora")}
BOUND = 1e-3
"""Relative difference of a loss. TRL rounds the initial values of adapters to 16 bits, and trains those on a quantized
base in 16 bits."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=CHATML)


def every_cell(usual: set[tuple[str, str]]) -> Any:
    """Parametrize with all objectives and adapters; `make test` runs the `usual` ones, `make test-all` each."""
    return pytest.mark.parametrize(
        ("kind", "adapter"),
        [
            pytest.param(kind, adapter, marks=[] if (kind, adapter) in usual else pytest.mark.full)
            for kind in DATA
            for adapter in ADAPTERS
        ],
    )


def settings(kind: str, adapter: str) -> dict[str, Any]:
    """Configuration of a run, with the defaults of a GPU written out."""
    config: dict[str, Any] = {
        "method": DATA[kind][0], "max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "batch_size": 4,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "optim": "adamw_torch", "max_seq_length": 64,
        "dtype": "bfloat16", "gradient_checkpointing": adapter != "lora", **ADAPTERS[adapter],
    }  # fmt: skip
    if adapter != "full":
        config["lora_dropout"] = 0.0
    if adapter == "qlora":
        config["bnb_4bit_compute_dtype"] = "bfloat16"
    if kind == "packed":
        config["packing"] = True
    if config["method"] == "rlhf":
        config["rlhf"] = {
            "algorithm": kind, "num_generations": 4, "max_completion_length": 12, "rewards": [LENGTH], "beta": 0.05,
        }  # fmt: skip
    return config


def settings_of_trl(kind: str, adapter: str) -> dict[str, Any]:
    """The same for TRL."""
    options: dict[str, Any] = {"learning_rate": 1e-3, "activation_checkpointing": adapter != "lora"}
    if DATA[kind][0] == "rlhf":
        options |= {"num_generations": 4, "max_completion_length": 12, "reward_funcs": [near_eight], "beta": 0.05}
    else:
        options["max_length"] = 64
    if kind == "packed":
        options["packing"] = True
    if kind == "dpo":
        options["precompute_ref_log_probs"] = True
    if kind == "rloo":
        options["normalize_advantages"] = True
    return options


@every_cell(USUAL)
def test_losses_in_bfloat16_are_within_the_bound_of_plain_trls(
    kind: str, adapter: str, forks: Forks, model: Path, tmp_path: Path
) -> None:
    method, data_format, make_data = DATA[kind]
    data = make_data(tmp_path / "rows.jsonl", 40)
    done = forks.run(
        make_job(tmp_path, model, data, data_format=data_format, **settings(kind, adapter)), cuda_autocast=True
    )
    ours = losses(done)
    with cuda_autocast():
        theirs = plain_log(
            "sft" if kind == "packed" else kind, model, data, tmp_path / "plain", adapter, steps=STEPS, batch_size=4,
            dtype=torch.bfloat16, **settings_of_trl(kind, adapter),
        )  # fmt: skip
    # The loss of `rlhf` is near 0 in each round, so the rewards of its completions are compared too.
    assert ours == pytest.approx([entry["loss"] for entry in theirs], rel=BOUND, abs=1e-6)
    if method == "rlhf":
        assert measured(done, "reward") == pytest.approx([entry["reward"] for entry in theirs], rel=BOUND)


@every_cell(set())
def test_a_run_in_bfloat16_goes_on_exactly_after_an_evaluation(
    kind: str, adapter: str, forks: Forks, model: Path, tmp_path: Path
) -> None:
    _, data_format, make_data = DATA[kind]
    config = settings(kind, adapter) | {"eval_split": 0.2, "eval_steps": 2}
    if adapter != "full":
        config["lora_dropout"] = 0.05
    job = make_job(tmp_path, model, make_data(tmp_path / "rows.jsonl", 40), data_format=data_format, **config)
    whole = forks.run(job, cuda_autocast=True)
    losses(whole)
    resumed = make_job(
        tmp_path, model, tmp_path / "rows.jsonl", data_format=data_format, attempt=2,
        resume_from=whole.checkpoint(2), **config,
    )  # fmt: skip
    again = forks.run(resumed, cuda_autocast=True)
    losses(again)
    assert again.steps == {step: reported for step, reported in whole.steps.items() if step > 2}
    assert again.of("config")[0]["facts"]["fidelity"] == "exact"
