"""A run that is preempted loses nothing: with the whole service and real training on one CPU slot."""

from pathlib import Path
from typing import Any

from tests.e2e.conftest import TrainingStack


def start(stack: TrainingStack, max_steps: int, **values: Any) -> str:
    config = {
        "base_model": "tiny", "method": "lora", "lora_r": 4, "lora_dropout": 0.1, "learning_rate": 1e-2,
        "max_seq_length": 64, "packing": False, "batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": max_steps, "save_steps": 100, "logging_steps": 50,
    }  # fmt: skip
    return stack.create(config=config, backend="celery", dataset_id=stack.chats, **values)


def test_a_preempted_run_continues_exactly_after_the_one_above_it(tmp_path: Path) -> None:
    stack = TrainingStack(tmp_path, preempt_after_seconds=0, preempt_min_seconds=0)
    try:
        stack.add_worker(slots=1)
        whole = start(stack, 150)
        assert stack.until(whole, "completed", "failed", timeout=120)["status"] == "completed"
        low = start(stack, 150)
        stack.until_step(low, 20, timeout=120)
        high = start(stack, 3, priority=5)
        assert stack.until(high, "completed", "failed", timeout=120)["status"] == "completed"
        shown = stack.until(low, "completed", "failed", timeout=120)
        assert (shown["status"], shown["attempt"]) == ("completed", 2)
        assert stack.steps(low) == stack.steps(whole)
        reasons = [event["reason"] for event in stack.events(low) if event["type"] == "status"]
        assert f"preempted for run {high}, which has a higher priority" in reasons
        ends = {run: stack.client.get(f"/v1/runs/{run}").json()["finished_at"] for run in (high, low)}
        assert ends[high] < ends[low]
    finally:
        stack.close()
