"""A resumed run goes on exactly: losses, rows and weights are those of a run that was never interrupted."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.worker.training.tiny import Forks, Outcome, make_job

STEPS = 10
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"method": "lora", "lora_dropout": 0.1, "lora_r": 4},
    "qlora": {"method": "qlora", "lora_dropout": 0.1, "lora_r": 4},
    "sft": {"method": "sft", "lora_dropout": 0.1, "lora_r": 4, "load_in_8bit": True, "neftune_noise_alpha": 5.0},
}
COMMON: dict[str, Any] = {
    "packing": True,
    "max_seq_length": 128,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "max_steps": STEPS,
    "save_steps": 1,
    "save_total_limit": None,
    "logging_steps": 3,
    "eval_split": 0.2,
    "eval_steps": 3,
}


def weights(outcome: Outcome) -> dict[str, str]:
    """Hashes of the weight files of an output."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in outcome.output.glob("*.safetensors")}


def figures(outcome: Outcome) -> list[dict[str, Any]]:
    """The metrics of an output without what depends on the clock."""
    told = []
    for line in (outcome.output / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        point.update(point.pop("extra", {}))
        clock = ("second", "gpu_memory")
        told.append({name: value for name, value in point.items() if not any(word in name for word in clock)})
    return told


@pytest.fixture(scope="module", params=METHODS)
def undisturbed(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    forks: Forks,
    tiny_model: Path,
    chats: Path,
) -> Outcome:
    """An uninterrupted run of each method, with a checkpoint after every step."""
    config = METHODS[request.param] | COMMON
    outcome = forks.run(make_job(tmp_path_factory.mktemp(request.param), tiny_model, chats, **config))
    assert outcome.result["outcome"] == "completed", outcome.result
    assert len(outcome.steps) == STEPS
    return outcome


def resumed(forks: Forks, original: Outcome, step: int, tmp_path: Path, **changes: Any) -> Outcome:
    job = original.job
    config = {name: job["config"][name] for name in job["given"] if name != "base_model"} | changes
    again = make_job(
        tmp_path, job["base_model"]["path"], job["dataset"]["path"], attempt=2,
        resume_from=original.checkpoint(step), **config,
    )  # fmt: skip
    return forks.run(again)


class TestExact:
    # 11 packed sequences in batches of 2, two batches a step: 3 steps an epoch, the last of one batch of 1 or 2.
    @pytest.mark.parametrize("step", [1, 3, 5, STEPS], ids=["first", "epoch-boundary", "mid-epoch", "last"])
    def test_losses_rows_and_weights_equal_the_undisturbed_runs(
        self, undisturbed: Outcome, step: int, forks: Forks, tmp_path: Path
    ) -> None:
        again = resumed(forks, undisturbed, step, tmp_path)
        assert again.result["outcome"] == "completed", (again.result, again.stderr)
        assert again.steps == {n: told for n, told in undisturbed.steps.items() if n > step}
        assert weights(again) == weights(undisturbed)
        assert figures(again) == figures(undisturbed)
