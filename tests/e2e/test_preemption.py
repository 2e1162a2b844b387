"""A run that is preempted loses nothing: with the whole service and real training on one CPU slot."""

import pytest

from tests.e2e.conftest import TrainingStack


@pytest.mark.usefixtures("ends")
def test_a_preempted_run_continues_exactly_after_the_one_above_it(stack: TrainingStack, undisturbed: str) -> None:
    with stack.pace.slow_from(8):
        low = stack.train(save_steps=100)
        stack.until_step(low, 8, timeout=120)
        high = stack.train(max_steps=3, priority=5)
        assert stack.until(high, "completed", "failed", timeout=120)["status"] == "completed"
    shown = stack.until(low, "completed", "failed", timeout=120)
    assert (shown["status"], shown["attempt"]) == ("completed", 2)
    assert stack.steps(low) == stack.steps(undisturbed)
    reasons = [event["reason"] for event in stack.events(low) if event["type"] == "status"]
    assert f"preempted for run {high}, which has a higher priority" in reasons
    ends = {run: stack.client.get(f"/v1/runs/{run}").json()["finished_at"] for run in (high, low)}
    assert ends[high] < ends[low]
