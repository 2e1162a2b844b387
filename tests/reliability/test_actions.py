"""What is asked of a run while it trains reaches it, takes effect at one step, and outlives the trainer that did it."""

from typing import Any

import pytest

from tests.stack import Stack
from tests.waiting import eventually

LONG = {"max_steps": 5000, "save_steps": 5000, "logging_steps": 1, "batch_size": 1, "gradient_accumulation_steps": 1}


def ask(stack: Stack, run_id: str, action: str, **parameters: Any) -> str:
    answer = stack.client.post(f"/v1/runs/{run_id}/actions", json={"action": action, **parameters})
    assert answer.status_code == 202, answer.text
    action_id: str = answer.json()["id"]
    return action_id


def answered(stack: Stack, run_id: str, action_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        shown: dict[str, Any] = stack.client.get(f"/v1/runs/{run_id}/actions/{action_id}").json()
        return shown if shown["status"] != "waiting" else None

    return eventually(look, timeout=60, what=f"{action_id} is answered")


def reported(stack: Stack, run_id: str) -> list[tuple[str, int]]:
    return [(event["action"], event["step"]) for event in stack.events(run_id) if event["type"] == "action"]


class TestActions:
    def test_each_is_done_at_one_step_and_again_at_that_step_when_the_trainer_is_lost_behind_it(
        self, stack: Stack
    ) -> None:
        run_id = stack.create(config={**LONG, "eval_split": 0.2, "eval_steps": 5000})
        # Asked for while it waits: done once it trains.
        first = [ask(stack, run_id, "evaluate"), ask(stack, run_id, "checkpoint", pin=True)]
        worker = stack.add_worker()
        evaluated, saved = [answered(stack, run_id, action_id) for action_id in first]
        assert evaluated["status"] == saved["status"] == "done" and evaluated["step"] == saved["step"] >= 1
        requests: list[tuple[str, dict[str, Any]]] = [
            ("set_learning_rate", {"learning_rate": 0.5}),
            ("sample", {"prompts": ["why"]}),
            ("extend", {"max_steps": 6000}),
        ]
        done = [answered(stack, run_id, ask(stack, run_id, name, **requested)) for name, requested in requests]
        assert [one["status"] for one in done] == ["done"] * 3
        stack.until_step(run_id, done[-1]["step"] + 2)
        worker.kill()
        before = reported(stack, run_id)
        assert before == [(one["action"], one["step"]) for one in (evaluated, saved, *done)]
        events = stack.events(run_id)
        points = {event["step"]: event for event in events if event["type"] == "metric"}
        at = done[0]["step"]
        assert points[at - 1]["learning_rate"] < 0.01 < points[at + 1]["learning_rate"]
        assert [event["step"] for event in events if event["type"] == "eval"] == [evaluated["step"]]
        (sample,) = [event for event in events if event["type"] == "sample"]
        assert done[1]["result"]["samples"] == [{"prompt": "why", "completion": sample["completion"]}]
        shown = stack.run(run_id)
        assert shown["total_steps"] == 6000
        assert (shown["effective_config"]["learning_rate"], shown["effective_config"]["max_steps"]) == (0.5, 6000)
        (pinned,) = stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
        assert (pinned["id"], pinned["pinned"], pinned["step"]) == (
            saved["result"]["checkpoint_id"],
            True,
            saved["step"],
        )

        stack.add_worker()
        eventually(
            lambda: len(reported(stack, run_id)) == 8, timeout=60, what="the next attempt has done all of it again"
        )
        assert reported(stack, run_id) == [*before, *before[2:]], "what the checkpoint holds is not done again"
        assert stack.run(run_id)["total_steps"] == 6000
        stack.stop(run_id, save_checkpoint=False)
        stack.until(run_id, "cancelled")

    def test_action_that_the_run_does_not_reach_is_refused_with_the_reason(self, stack: Stack) -> None:
        run_id = stack.create({"load_seconds": 30})
        waiting = ask(stack, run_id, "checkpoint")
        stack.add_worker()
        stack.until(run_id, "initializing")
        stack.stop(run_id)
        stack.until(run_id, "cancelled")
        left = answered(stack, run_id, waiting)
        assert left["status"] == "refused" and "cancelled" in left["message"]


class TestStopAtTheEndOfTheEpoch:
    """An epoch of 50 steps."""

    @pytest.fixture
    def run_id(self, stack: Stack) -> str:
        run_id = stack.create({"step_seconds": 0.2}, LONG)
        stack.add_worker()
        stack.until(run_id, "running")  # stored after the trainer's own journal says so
        stack.until_step(run_id, 3)
        answer = stack.client.post(f"/v1/runs/{run_id}/stop", json={"mode": "epoch_end"})
        assert answer.status_code == 202 and answer.json()["status"] in ("running", "checkpointing")
        return run_id

    def test_trains_to_it_and_saves_though_the_worker_dies(self, stack: Stack, run_id: str) -> None:
        stack.until_step(run_id, 10)
        stack.workers[-1].kill()
        stack.add_worker()
        shown = stack.until(run_id, "cancelled", timeout=60)
        assert (shown["current_step"], shown["attempt"], shown["stop_mode"]) == (50, 2, "epoch_end")
        (saved,) = [event for event in stack.events(run_id) if event["type"] == "checkpoint"]
        assert (saved["step"], saved["kind"]) == (50, "stop")

    def test_a_stop_ends_it_at_once(self, stack: Stack, run_id: str) -> None:
        assert stack.stop(run_id).json()["stop"]["mode"] == "checkpoint"
        shown = stack.until(run_id, "cancelled", timeout=60)
        assert shown["current_step"] < 50 and shown["checkpoint_path"]


def test_a_stop_with_the_best_checkpoint_saves_nothing_more(stack: Stack) -> None:
    config = {**LONG, "eval_split": 0.2, "eval_steps": 5}
    run_id = stack.create({"step_seconds": 0.05}, config)
    stack.add_worker()
    eventually(lambda: stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"], timeout=60)
    reported = stack.client.post(f"/v1/runs/{run_id}/stop", json={"mode": "best"}).json()["stop"]
    assert reported["mode"] == "best" and reported["save_seconds"] > 0
    shown = stack.until(run_id, "cancelled", timeout=60)
    saved = stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
    assert {one["kind"] for one in saved} == {"best"}
    best = min(saved, key=lambda checkpoint: checkpoint["metrics"]["eval_loss"])
    assert shown["checkpoint_path"].endswith(best["name"])
