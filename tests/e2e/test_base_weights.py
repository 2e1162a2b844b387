"""Base models whose weights are wrong: the run fails, says what is wrong, and has no output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import TrainingStack
from tests.worker.training.model.test_checked_weights import with_resized_embeddings
from tests.worker.training.tiny import make_tiny_model

LORA: dict[str, Any] = {
    "method": "lora", "max_steps": 2, "batch_size": 2, "gradient_accumulation_steps": 1, "max_seq_length": 64,
    "on_non_finite": "rewind", "packing": False,
}  # fmt: skip
TENSOR = "model.layers.0.mlp.down_proj.weight"


def without_tensor(weights: dict[str, torch.Tensor]) -> None:
    del weights[TENSOR]


def with_nan(weights: dict[str, torch.Tensor]) -> None:
    weights[TENSOR][0, 0] = torch.nan


def that_overflows(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"][:] = 3e38


def failed_run(stack: TrainingStack, base_model: str) -> tuple[str, str]:
    """Train on a base model; return the code and the message of the failed run, which has no output."""
    run = stack.until(stack.train(**LORA, base_model=base_model), "completed", "failed", timeout=180)
    assert run["status"] == "failed"
    assert stack.client.get(f"/v1/runs/{run['id']}/artifacts").status_code in (404, 409)
    return run["error_code"], run["error_message"]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (without_tensor, "config_error", f"1 tensor is missing ({TENSOR})"),
        (with_nan, "config_error", f"NaN or infinite, in {TENSOR}"),
        (that_overflows, "non_finite_loss", "All 2 steps were skipped"),
    ],
    ids=["missing tensor", "NaN", "no step with finite gradients"],
)
def test_a_base_whose_weights_cannot_be_trained_fails_the_run(
    change: Callable[[dict[str, torch.Tensor]], None], code: str, said: str, stack: TrainingStack
) -> None:
    name = change.__name__.replace("_", "-")
    path = make_tiny_model(stack.settings.models_folder / name) / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})

    failed_code, message = failed_run(stack, name)

    assert failed_code == code and said in message


def test_an_adapter_with_more_embeddings_than_its_base_fails_with_their_sizes(
    stack: TrainingStack, tmp_path: Path
) -> None:
    base = make_tiny_model(stack.settings.models_folder / "plain-base")
    with_resized_embeddings(base, stack.settings.models_folder / "resized")

    code, message = failed_run(stack, "resized")

    assert code == "config_error" and "embed_tokens.weight has the size" in message
