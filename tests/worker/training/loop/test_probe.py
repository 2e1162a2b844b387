"""A probe trains two steps on the longest rows, tells what they took, and leaves nothing behind."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from anneal.contracts.training_config.fields import TrainingConfig
from tests.worker.training.tiny import Forks, make_job, write_rows
from tests.worker.training.two_ranks import TwoRanks
from worker.training.loop import probe as measuring

CONFIG: dict[str, Any] = {
    "lora_r": 4, "max_seq_length": 128, "epochs": 3, "batch_size": 2, "gradient_accumulation_steps": 2,
    "optim": "adamw_torch", "save_steps": 1, "logging_steps": 50, "extra": {"probe": True},
}  # fmt: skip
WORDS = [7, 30, 4, 21, 9, 28, 3, 5, 25, 8]
"""Of each row; the longest four are 1, 3, 5 and 8."""


def texts(path: Path) -> Path:
    return write_rows(path, ({"text": "model " * words} for words in WORDS))


def pairs(path: Path) -> Path:
    """Pairs of which now the better answer is the longer one, now the other."""

    def pair(row: int, words: int) -> dict[str, str]:
        answers = ["model " * words, "rows"]
        chosen, rejected = answers if row % 2 else answers[::-1]
        return {"prompt": "what\n", "chosen": chosen, "rejected": rejected}

    return write_rows(path, (pair(row, words) for row, words in enumerate(WORDS)))


@pytest.mark.parametrize(("method", "data_format", "make"), [("lora", "text", texts), ("dpo", "preference", pairs)])
def test_a_probe_takes_two_steps_on_the_longest_rows_and_keeps_nothing(
    method: str, data_format: str, make: Any, tiny_model: Path, tmp_path: Path, forks: Forks
) -> None:
    data = make(tmp_path / "rows.jsonl")
    more = {"load_in_4bit": False} if method == "dpo" else {}
    job = make_job(tmp_path, tiny_model, data, data_format=data_format, method=method, **CONFIG, **more)
    probe = forks.run(job)
    assert probe.result["outcome"] == "completed", (probe.result, probe.stderr[-2000:])
    assert {step: sorted(rows) for step, (_, rows) in probe.steps.items()} == {1: [1, 3, 5, 8], 2: [1, 3, 5, 8]}
    # Ten rows in threes of epochs, four a step.
    assert probe.of("config")[0]["facts"]["whole_run_steps"] == 9
    first, second = probe.of("metric")
    assert (first["step"], second["step"], second["total_steps"]) == (1, 2, 2)
    assert second["extra"]["step_seconds"] > 0 and second["extra"]["host_memory_peak_mb"] > 0
    assert probe.of("checkpoint") == [] and probe.result["output"] is None
    assert {path.name for path in probe.folder.iterdir()} <= {"job.json", "metrics.jsonl", "stdout", "stderr"}
    if method == "dpo":  # the whole run has three passes, so it has the reference's answers made before the first
        assert any("reference log-probabilities of 4 pairs" in one["line"] for one in probe.of("message"))


def test_on_two_devices_it_takes_the_longest_rows_of_a_step_of_both(
    two_ranks: TwoRanks, tiny_model: Path, tmp_path: Path
) -> None:
    data = texts(tmp_path / "rows.jsonl")
    job = make_job(tmp_path, tiny_model, data, data_format="text", method="lora", **{**CONFIG, "batch_size": 1})
    probe = two_ranks.run(job)
    assert probe.result["outcome"] == "completed", (probe.result, probe.stderr[-2000:])
    assert {step: sorted(rows) for step, (_, rows) in probe.steps.items()} == {1: [1, 3, 5, 8], 2: [1, 3, 5, 8]}
    assert probe.of("config")[0]["facts"]["whole_run_steps"] == 9
    assert probe.of("checkpoint") == [] and probe.result["output"] is None


@pytest.mark.parametrize(
    ("columns", "config", "longest"),
    [
        ({"input_ids": [[1] * 60, [1] * 64, [1] * 9]}, {"packing": True}, [1, 0]),
        (
            {"chosen_ids": [[1] * 4, [1] * 5, [1]], "rejected_ids": [[1], [1] * 2, [1] * 9]},
            {"method": "reward"},
            [2, 1],
        ),
        (
            {"prompt_ids": [[1] * 9, [1], [1]], "chosen_ids": [[1]] * 3, "rejected_ids": [[1], [1] * 20, [1]]},
            {"method": "dpo"},
            [1, 0],
        ),
    ],
)
def test_packs_and_pairs_are_as_long_as_what_the_model_sees(columns: Any, config: Any, longest: list[int]) -> None:
    configured = TrainingConfig(base_model="any", batch_size=1, gradient_accumulation_steps=2, **config)
    rows = Dataset.from_dict({**columns, "rows": [[0], [1], [2]]})
    assert [row for (row,) in measuring.longest_rows(rows, configured, 1)["rows"]] == longest
